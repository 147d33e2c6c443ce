"""Means, over the micro-batches since the last line of the log and over processes, of what a method does."""

from collections.abc import Callable

import torch
from torch import Tensor


class StepLogs:
    """Collects scalars without reading them from the device, until they are logged.

    A name that ends in "_max" is a maximum, the others are means.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, **values: Tensor) -> None:
        """One scalar for each name."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.detach().float())

    def take(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """What was collected, over all processes; `gather` stacks a vector (n,) of every process to (processes, n)."""
        names = sorted(self._values)
        if not names:
            return {}
        own = torch.stack([_reduce(name, torch.stack(self._values[name]).cpu()) for name in names])
        self._values = {}
        everyone = gather(own)
        return {name: float(_reduce(name, everyone[:, index])) for index, name in enumerate(names)}


def _reduce(name: str, values: Tensor) -> Tensor:
    return values.max() if name.endswith("_max") else values.mean()
