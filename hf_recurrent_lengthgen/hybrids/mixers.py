"""Corrections for mixers of Transformers that treat a given state wrongly, active while a `StateCache` is in use.

- The Mamba-2 mixers limit the step size in the scan of several tokens, but not in the step for one (NemotronH and
  Zamba2 have a lower limit by default). A text read token by token would give other states than at once.
- The Mamba-1 mixers (Mamba, FalconMamba, Jamba, Zamba) drop the recurrent state when they read several tokens, because
  their scan takes none. They run with our scan instead.

Functions of the stock modules are replaced during one forward pass and in its thread. Calls without our states go to
the stock functions.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.state_cache import Overwritten, StateCache
from hf_recurrent_lengthgen.models.modeling_protocols import StatefulModel
from hf_recurrent_lengthgen.models.rows_moved import zero_past_end
from hf_recurrent_lengthgen.models.scan_backends import resolve_backend
from hf_recurrent_lengthgen.models.scan_pieces import piece_selective
from hf_recurrent_lengthgen.models.scan_selective import scan_selective, selective_scan_fn
from hf_recurrent_lengthgen.models.scan_ssd import mamba_chunk_scan_combined
from hf_recurrent_lengthgen.models.state_value import state_dtype

STEP, CHUNKS, SCAN = "mamba2_selective_state_update", "mamba2_chunk_scan", "mamba_selective_scan"


class _Exchanged:
    """A function of a stock module that some thread has replaced; in other threads it is the stock one."""

    lock = threading.Lock()

    def __init__(self, stock: Any) -> None:
        self.stock, self.users, self.of_thread = stock, 0, threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.of_thread, "function", self.stock)(*args, **kwargs)


def files_of(model: StatefulModel) -> set[ModuleType]:
    """The modules of Python that have the classes of a model."""
    return {sys.modules[type(module).__module__] for module in model.modules()}


@contextmanager
def exchanged(files: Iterable[ModuleType], name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Put `replacement(stock function)` into every module that has a function of this name, for this thread."""
    exchanged = []
    try:
        for file in (file for file in files if hasattr(file, name)):
            with _Exchanged.lock:
                switch = getattr(file, name)
                if not isinstance(switch, _Exchanged):
                    switch = _Exchanged(switch)
                    setattr(file, name, switch)
                switch.users += 1
            before = getattr(switch.of_thread, "function", switch.stock)
            switch.of_thread.function = replacement(before)
            exchanged.append((file, switch, before))
        yield
    finally:
        for file, switch, before in reversed(exchanged):
            switch.of_thread.function = before
            with _Exchanged.lock:
                switch.users -= 1
                if not switch.users:
                    setattr(file, name, switch.stock)


def as_chunk_scan(
    run: Callable[[tuple[Tensor, ...], Tensor, dict[str, Any]], tuple[Tensor, Tensor]],
) -> Callable[..., Any]:
    """`run` with the signature of `mamba2_chunk_scan` of Transformers.

    It takes the inputs of `scan_ssd`, the state before them and its options, and gives outputs and a state.
    """

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 64,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        A = A.float()
        dt = dt.to(A.dtype) if dt_bias is None else dt.to(A.dtype) + dt_bias.to(A.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        D = A.new_zeros(A.shape) if D is None else D.to(A.dtype)
        if initial_states is None:
            initial_states = A.new_zeros(len(x), *x.shape[2:], B.shape[3])
        inputs = x.to(A.dtype), dt, A, B.to(A.dtype), C.to(A.dtype), D
        backend = resolve_backend("auto", x.device.type, mamba_chunk_scan_combined is not None)
        options = {"backend": backend, "chunk_size": chunk_size if backend == "kernel" else 64}
        y, state = run(inputs, initial_states.as_subclass(Tensor).to(A.dtype), options)
        return (y, state) if return_final_states else y

    return scan


@contextmanager
def limited_steps(model: StatefulModel) -> Iterator[None]:
    """Limit the step size in single-token steps, too, if the state comes from a `StateCache`."""
    modules: Iterator[Any] = model.modules()
    given = {each.layer_idx: tuple(each.time_step_limit) for each in modules if getattr(each, "time_step_limit", None)}
    limits = {layer: limit for layer, limit in given.items() if limit != (0.0, math.inf)}
    with exchanged(files_of(model) if limits else (), STEP, lambda step: _limited(step, limits)):
        yield


def _limited(step: Any, limits: dict[int, tuple[float, float]]) -> Any:
    """The stock step, with the limited step size for our states, unchanged for others."""

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


class Mamba1StateCache(StateCache):
    """Hides the recurrent state from Mamba-1 mixers, which use it for single tokens only, and gives it to our scan."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        state = self._asked(layer_idx)
        # The mixer asks right before it scans. Zamba scans the heads of (B, H, P, N) one by one.
        heads = () if state is None else state.unbind(1) if state.ndim == 4 else (state,)
        self.to_scan = iter(heads)


@contextmanager
def scans_from_state(model: StatefulModel, state_cache: Mamba1StateCache) -> Iterator[None]:
    """Let Mamba-1 mixers scan from the states of the state cache.

    Raises:
        ValueError: for an adapter on `dt_proj`, which the stock mixers bypass.
    """
    for name, module in model.named_modules():
        if name.endswith("dt_proj") and hasattr(module, "base_layer"):
            raise ValueError(
                f"The adapter on {name} has no effect, since {type(model).__name__} reads the weight directly: take "
                "dt_proj out of the adapter's targets, or load a Mamba or FalconMamba with load_model."
            )
    with exchanged(files_of(model), SCAN, lambda stock: _scan_of(state_cache, stock)):
        yield


def _scan_of(state_cache: Mamba1StateCache, stock: Any) -> Any:
    """`mamba_selective_scan` of Transformers (time is the last dimension) from the states of the state cache."""

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = True,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not return_last_state:  # a call without a cache has none of our states
            return stock(x, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **kwargs)
        dtype = state_dtype(x.dtype)
        state = next(state_cache.to_scan, None)
        if state is None:
            state = torch.zeros(x.shape[0], *A.shape, device=x.device, dtype=dtype)
        dt = F.softplus(dt.to(dtype) + (0 if delta_bias is None else delta_bias.to(dtype)[:, None]))
        if state_cache.rows is not None:
            state_cache.stopped.add(state_cache.asking)
            dt = zero_past_end(dt.mT, state_cache.rows).mT
        backend = resolve_backend("auto", x.device.type, selective_scan_fn is not None)
        inputs = (x.mT, dt.mT, A, B.mT, C.mT, D)
        if (shared := state_cache.shared) is not None:
            y, final = shared.scan(scan_selective, piece_selective, inputs, state, {"backend": backend})
        else:
            y, final = scan_selective(*inputs, state, backend=backend)
        return (y.mT * F.silu(z)).to(x.dtype), final

    return scan
