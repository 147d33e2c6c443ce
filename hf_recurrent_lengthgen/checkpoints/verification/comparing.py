"""Comparisons of outputs, as the checks of a verification."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.records import Check

Part = TypeVar("Part")

TOLERANCE = 1e-5
"""The largest allowed `difference`."""

Outputs = Mapping[str, Tensor]
"""Tensors by name: "logits" (B, T, V), and "state.{layer}.{part}" for each part of the final state."""


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of two tensors, divided by the largest finite `expected` value if that is above 1.

    Infinite for tensors of different shapes, and if only one of two values is NaN or infinite.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    apart = (actual - expected).abs()
    apart = apart.masked_fill((actual == expected) | (actual.isnan() & expected.isnan()), 0.0)
    largest = float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) / max(1.0, largest)


def compare(
    what: str, against: str, tokens: int, actual: Outputs, expected: Outputs, tolerance: float = TOLERANCE
) -> Check:
    """The check of the tensor that differs most; a tensor on one side only has an infinite difference."""
    names = actual.keys() | expected.keys()
    both = actual.keys() & expected.keys()
    apart = max(difference(actual[name], expected[name]) if name in both else float("inf") for name in names)
    return Check(what, against, tokens, apart, tolerance)


def count(what: str, against: str, tokens: int, number: int) -> Check:
    """A check that counts errors, of which none are allowed."""
    return Check(what, against, tokens, float(number), 0.0)


def named_parts(layers: Iterable[Iterable[Part]]) -> dict[str, Part]:
    """The parts of the state of every layer by their names among outputs."""
    return {f"state.{i}.{j}": part for i, layer in enumerate(layers) for j, part in enumerate(layer)}


def states(outputs: Outputs) -> Outputs:
    """The parts of the final state among outputs."""
    return {name: tensor for name, tensor in outputs.items() if name != "logits"}


def not_finite(outputs: Outputs) -> int:
    """Number of values that are NaN or infinite."""
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in outputs.values())


def compare_outputs(against: str, actual: Outputs, expected: Outputs, tolerance: float = TOLERANCE) -> list[Check]:
    """The checks of logits, and of final states if both have them."""
    tokens = actual["logits"].shape[1]
    logits = {"logits": actual["logits"]}, {"logits": expected["logits"]}
    checks = [compare("logits", against, tokens, *logits, tolerance)]
    if states(actual) and states(expected):
        checks.append(compare("final states", against, tokens, states(actual), states(expected), tolerance))
    return checks
