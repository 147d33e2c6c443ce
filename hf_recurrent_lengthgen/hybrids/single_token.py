"""What Transformers does otherwise for a single token than for several, made the same.

The Mamba-2 mixers of Transformers limit the step size in the scan of several tokens, but not in the step for one
(with NemotronH's and Zamba2's defaults it has a lower limit). Reading a text token by token would then give other
states than reading it at once.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_recurrent_lengthgen.hybrids.carrier import Overwritten

STEP = "mamba2_selective_state_update"


@contextmanager
def limited_steps(model: nn.Module) -> Iterator[None]:
    """Limit the step size also in single-token steps on states that come from a `StateCarrier`."""
    limits: dict[int, tuple[float, float]] = {}
    files = set()
    for module in model.modules():
        limit = getattr(module, "time_step_limit", None)
        if limit is not None and tuple(limit) != (0.0, math.inf):
            limits[module.layer_idx] = tuple(limit)  # type: ignore[index]
            files.add(sys.modules[type(module).__module__])
    with ExitStack() as stack:
        for file in files:
            step = getattr(file, STEP)
            stack.callback(setattr, file, STEP, step)
            setattr(file, STEP, _limited(step, limits))
        yield


def _limited(step: Any, limits: dict[int, tuple[float, float]]) -> Any:
    """The stock step with the step size given ready, for our states; the stock step for others."""

    def limited(
        state: Tensor, x: Tensor, dt: Tensor, *args: Any, dt_bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if not isinstance(state, Overwritten):
            return step(state, x, dt, *args, dt_bias=dt_bias, **kwargs)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if kwargs.get("dt_softplus"):
            dt = F.softplus(dt)
        dt = dt.clamp(*limits[state.layer_idx])
        return step(state, x, dt, *args, **kwargs | {"dt_softplus": False})

    return limited
