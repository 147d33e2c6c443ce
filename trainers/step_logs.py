"""Means, over the micro-batches since the last line of the log and over processes, of what a method does."""

from collections.abc import Callable

import torch
from torch import Tensor


class StepLogs:
    """Collects scalars without reading them from the device, until they are logged.

    A name that ends in "_max" is a maximum, the others are means.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[Tensor, int]] = {}

    def add(self, **values: Tensor) -> None:
        """One scalar for each name."""
        for name, value in values.items():
            value = value.detach().float()
            total, count = self._values.get(name, (value, 0))
            if count:
                total = torch.maximum(total, value) if _is_max(name) else total + value
            self._values[name] = total, count + 1

    def take(self, gather: Callable[[list[dict[str, float]]], list[dict[str, float]]]) -> dict[str, float]:
        """What was collected, over all processes; `gather` joins the lists of all of them. Values may lack in some."""
        own = {name: float(total if _is_max(name) else total / count) for name, (total, count) in self._values.items()}
        self._values = {}
        everyone = gather([own])
        names = sorted({name for values in everyone for name in values})
        found = {name: [values[name] for values in everyone if name in values] for name in names}
        return {name: max(values) if _is_max(name) else sum(values) / len(values) for name, values in found.items()}


def _is_max(name: str) -> bool:
    return name.endswith("_max")
