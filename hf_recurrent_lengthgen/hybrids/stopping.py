"""States that stop at the last token of each row, in mixers that read on over the padding behind it.

Nothing that comes after a token changes its output, so all that padding could change is the state after the tokens.
Where a mixer calls a scan, the padding is given inputs that leave the state as it is: a step size of 0 (Mamba), no
decay and nothing written (delta rule), gates that keep everything (xLSTM). Short convolutions are stopped by
`StateCache` itself. MiniMax and Zaya have no such place, and refuse padding (`CacheAdapter.why_not_stop`).
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_recurrent_lengthgen.hybrids.mixers import CHUNKS, as_chunk_scan, exchanged, files_of
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import zero_past_end
from hf_recurrent_lengthgen.models.scan_pieces import piece_ssd
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd

# Delta rules of Transformers, with the arguments and results of fla's kernels; T = 1 goes to the recurrent ones.
RULES = {
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
}

_of_thread = threading.local()


def reading_now() -> Any:
    """The state cache of the forward pass of this thread, if its rows are shared or have padding at their ends."""
    return getattr(_of_thread, "state_cache", None)


@contextmanager
def scans_of_rows(model: HybridModel, state_cache: Any) -> Iterator[None]:
    """Let Mamba-2 mixers and our scan of the delta rule leave the state at padding, or start from folded states."""

    def run(inputs: tuple[Tensor, ...], state: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if (shared := state_cache.shared) is not None:
            return shared.scan(scan_ssd, piece_ssd, inputs, state, options)
        state_cache.stopped.add(state_cache.asking)
        x, dt, A, B, C, D = inputs
        return scan_ssd(x, zero_past_end(dt, state_cache.rows), A, B, C, D, state, **options)

    before, _of_thread.state_cache = reading_now(), state_cache
    try:
        with exchanged(files_of(model), CHUNKS, lambda _: as_chunk_scan(run)):
            yield
    finally:
        _of_thread.state_cache = before


def stopped_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the delta rule without decay and without writing at padding."""

    @functools.wraps(rule)
    def stopped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if getattr(state_cache := reading_now(), "rows", None) is not None:
            state_cache.stopped.add(state_cache.asking)
            g, beta = (zero_past_end(x, state_cache.rows) for x in (g, beta))
        return rule(q, k, v, g=g, beta=beta, **options)

    return stopped


@contextmanager
def stopped_xlstm(model: HybridModel, rows: Rows) -> Iterator[None]:
    """Let `xLSTMBackend` open forget gates and shut input gates (B, H, T) at padding, in this thread."""
    thread, real = threading.get_ident(), rows.real
    assert real is not None

    def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if threading.get_ident() != thread:
            return None
        f, i = kwargs["fgate"], kwargs["igate"]
        past_end = ~real[:, None]
        gates = {"fgate": f.masked_fill(past_end, 1e6), "igate": i.masked_fill(past_end, -1e30)}
        return args, kwargs | gates

    modules: Iterator[nn.Module] = model.modules()
    backends = [module for module in modules if type(module).__name__ == "xLSTMBackend"]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in backends]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
