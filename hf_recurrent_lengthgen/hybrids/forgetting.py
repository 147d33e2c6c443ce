"""Forgetting (`models/scan_forgetting.py`) in the Mamba mixers of Transformers, by replacing their scans.

Refused are the mixers of the delta rule, which forget in the families of this package only, those of xLSTM, whose
recurrence does more than decay what was written, and those of MiniMax and Bailing, whose scan is inside a larger
function.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.mixers import CHUNKS, SCAN, STEP, as_chunk_scan, exchanged
from hf_recurrent_lengthgen.hybrids.state_cache import Overwritten, StateCache
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel
from hf_recurrent_lengthgen.models.rows_moved import zero_past_end
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, SSDRecurrence
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd
from hf_recurrent_lengthgen.models.state_value import LayerState


def mamba_mixers(model: HybridModel) -> dict[int, Any]:
    """The Mamba mixers of a model by their layer."""
    modules: Iterator[Any] = model.modules()
    return {module.layer_idx: module for module in modules if hasattr(module, "ssm_state_size")}


def check_forgetting(model: HybridModel) -> None:
    """Refuse a `forgetting` that is out of range, or that the mixers of a wrapped model do not support."""
    rule = Forgetting.of(model.config)
    if rule == Forgetting():
        return
    mixers = mamba_mixers(model)
    other = [i for i, shape in enumerate(model._layout.shapes) if shape.recurrent != (0,) and i not in mixers]
    files = [sys.modules[type(mixer).__module__] for mixer in mixers.values()]
    if other or not mixers or not all(hasattr(file, SCAN) or hasattr(file, CHUNKS) for file in files):
        raise ValueError(
            f"{type(model).__name__} cannot be made to forget (layers {other or 'without Mamba mixers'}): this needs "
            "mixers of Mamba-1 or Mamba-2. Set forgetting to None."
        )
    kept = ("retention", "insertion", "delta_scale")
    rule.check_for(type(model).__name__, kept, "the caches of Transformers hold no window")


@contextmanager
def forgetting_scans(model: HybridModel, rule: Forgetting, state_cache: StateCache | None = None) -> Iterator[None]:
    """Let the Mamba-2 mixers of a model forget, with a state cache or a stock cache."""
    mixers = mamba_mixers(model)
    files = {sys.modules[type(mixer).__module__] for mixer in mixers.values()}
    files = {file for file in files if hasattr(file, CHUNKS)}
    scan = _scan_of(rule, state_cache)
    step = _step_of(scan, mixers)
    with exchanged(files, CHUNKS, lambda _: scan), exchanged(files, STEP, lambda _: step):
        yield


def _scan_of(rule: Forgetting, state_cache: StateCache | None) -> Callable[..., Any]:
    """`mamba2_chunk_scan` of Transformers that forgets."""

    def run(inputs: tuple[Tensor, ...], before: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        rows = None if state_cache is None else state_cache.rows
        if rows is not None:
            assert state_cache is not None
            state_cache.stopped.add(state_cache.asking)
            x, dt, *others = inputs
            inputs = x, zero_past_end(dt, rows), *others
        given = LayerState(before, before.new_empty(len(before), 0))
        y, state = SSDRecurrence.with_forgetting(rule, scan_ssd, inputs, given, rows, **options)
        return y, state.recurrent

    return as_chunk_scan(run)


def _step_of(scan: Callable[..., Any], mixers: dict[int, Any]) -> Callable[..., Tensor]:
    """`mamba2_selective_state_update` of Transformers as a scan of one token."""

    def step(state: Tensor, x: Tensor, *args: Any, z: Tensor | None = None, **kwargs: Any) -> Tensor:
        limit = (0.0, float("inf"))
        if isinstance(state, Overwritten):
            limit = getattr(mixers[state.layer_idx], "time_step_limit", limit)
        y, final = as_scan_of_one(scan, state, x, *args, **kwargs | {"limit": limit})
        state.copy_(final.to(state.dtype))
        return (y[:, 0] if z is None else y[:, 0] * F.silu(z)).to(x.dtype)

    return step


def as_scan_of_one(
    scan: Callable[..., Any],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Any:
    """Outputs and state of `mamba2_chunk_scan` of Transformers for the arguments of the step for one token.

    Of these, dt, dt_bias and D are repeated over the head dimension, A also over the state dimension.
    """
    return scan(
        x[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        D=None if D is None else D[:, 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        initial_states=state,
        dt_softplus=dt_softplus,
        dt_limit=limit,
        return_final_states=True,
    )
