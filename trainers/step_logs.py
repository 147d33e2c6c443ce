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
                total = torch.maximum(total, value) if name.endswith("_max") else total + value
            self._values[name] = total, count + 1

    def take(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """What was collected, over all processes; `gather` stacks a vector (n,) of every process to (processes, n)."""
        names = sorted(self._values)
        if not names:
            return {}
        own = [
            total if name.endswith("_max") else total / count for name, (total, count) in sorted(self._values.items())
        ]
        self._values = {}
        everyone = gather(torch.stack([value.cpu() for value in own]))
        columns = zip(names, everyone.unbind(1), strict=True)
        return {name: float(values.max() if name.endswith("_max") else values.mean()) for name, values in columns}
