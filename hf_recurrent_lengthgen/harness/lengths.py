"""Lengths of prompts: those that have a metric, and filling a prompt up to one."""

from collections.abc import Callable, Sequence

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""The lengths that have a metric."""


def check_lengths(wanted: Sequence[int]) -> None:
    """Raise a `ValueError` for lengths without a metric."""
    if unknown := sorted(set(wanted) - set(LENGTHS)):
        raise ValueError(f"max_seq_lengths must be some of {', '.join(map(str, LENGTHS))}, got {unknown}.")


def check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def most_that_fit(size: Callable[[int], int], length: int) -> int:
    """The most items, found by bisection, with which a prompt of `size(items)` tokens fits into `length`; -1 for none.

    The size may waver a little, but the one of the returned number does fit.
    """
    if size(0) > length:
        return -1
    fits, beyond = 0, 1
    while size(beyond) <= length:
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if size(middle) <= length:
            fits = middle
        else:
            beyond = middle
    return fits
