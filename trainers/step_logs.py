"""Means of a method's log values over processes and over the micro-batches since the last log entry."""

from collections.abc import Callable

import torch
from torch import Tensor


class StepLogs:
    """Collects scalars and reads them from the device only when they are logged.

    A name that ends in "_max" is logged as a maximum, other names as means.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[Tensor, int]] = {}

    def add(self, **values: Tensor) -> None:
        """Add one scalar per name."""
        for name, value in values.items():
            value = value.detach().float()
            total, count = self._values.get(name, (value, 0))
            if count:
                total = torch.maximum(total, value) if _is_max(name) else total + value
            self._values[name] = total, count + 1

    def take(self, gather: Callable[[list[dict[str, float]]], list[dict[str, float]]]) -> dict[str, float]:
        """Values over all processes, whose lists `gather` joins; a value may be missing in some processes."""
        own = {name: float(total if _is_max(name) else total / count) for name, (total, count) in self._values.items()}
        self._values = {}
        everyone = gather([own])
        names = sorted({name for values in everyone for name in values})
        found = {name: [values[name] for values in everyone if name in values] for name in names}
        return {name: max(values) if _is_max(name) else sum(values) / len(values) for name, values in found.items()}


def _is_max(name: str) -> bool:
    return name.endswith("_max")
