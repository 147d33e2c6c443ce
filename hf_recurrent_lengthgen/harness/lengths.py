"""Lengths of prompts."""

from collections.abc import Sequence

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""The lengths that have a metric."""


def check_lengths(wanted: Sequence[int]) -> None:
    """Raise a `ValueError` for lengths without a metric."""
    if unknown := sorted(set(wanted) - set(LENGTHS)):
        raise ValueError(f"max_seq_lengths must be some of {', '.join(map(str, LENGTHS))}, got {unknown}.")


def check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
