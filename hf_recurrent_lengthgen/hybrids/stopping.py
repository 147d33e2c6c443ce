"""States that stop at the last token of each row, in mixers that read on over the padding behind it.

Nothing that comes after a token changes its output, so all that padding could change is the state after the tokens.
Where a mixer calls a scan, the padding is given inputs that leave the state as it is: a step size of 0 (Mamba), no
decay and nothing written (delta rule), gates that keep everything (xLSTM). Elsewhere a hook on the mixer computes the
state from the real tokens (MiniMax, Zaya). Short convolutions are stopped by `StateCache` itself.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.hybrids.forgetting import forgetting_scans
from hf_recurrent_lengthgen.hybrids.mixers import exchanged
from hf_recurrent_lengthgen.models.forgetting import Forgetting
from hf_recurrent_lengthgen.models.padding import last_inputs, zero_past_end
from hf_recurrent_lengthgen.models.recurrent_state import state_dtype
from hf_recurrent_lengthgen.models.stateful_model import HybridModel

# Delta rules of Transformers, with the arguments and results of fla's kernels; T = 1 goes to the recurrent ones.
RULES = {
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
}

_of_thread = threading.local()


def stopping_now() -> Any:
    """The state cache of the forward pass of this thread, if its rows have padding at their ends."""
    return getattr(_of_thread, "state_cache", None)


@contextmanager
def stopped_scans(model: HybridModel, state_cache: Any) -> Iterator[None]:
    """Let Mamba-2 mixers and the delta rule, ours and the stock ones, leave the state at padding as it is."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    before = stopping_now()
    _of_thread.state_cache = state_cache
    try:
        with ExitStack() as stack:
            for name in RULES:
                stack.enter_context(exchanged((f for f in files if hasattr(f, name)), name, stopped_rule))
            stack.enter_context(forgetting_scans(model, Forgetting(), state_cache))
            yield
    finally:
        _of_thread.state_cache = before


def stopped_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the delta rule without decay and without writing at padding."""

    @functools.wraps(rule)
    def stopped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if (state_cache := stopping_now()) is not None:
            state_cache.stopped.add(state_cache.asking)
            g, beta = (zero_past_end(x, state_cache.lengths) for x in (g, beta))
        return rule(q, k, v, g=g, beta=beta, **options)

    return stopped


@contextmanager
def hooked(model: HybridModel, hooks: dict[str, Callable[..., Any]], before: bool = False) -> Iterator[None]:
    """Run hooks after (or before) the modules whose classes have these names, in this thread."""
    thread = threading.get_ident()

    def here(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: hook(*args) if threading.get_ident() == thread else None

    handles = []
    modules: Iterator[nn.Module] = model.modules()
    for module in modules:
        if (hook := hooks.get(type(module).__name__)) is None:
            continue
        if before:
            handles.append(module.register_forward_pre_hook(here(hook), with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(here(hook), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stopped_xlstm(lengths: Tensor) -> Callable[..., Any]:
    """A hook before `xLSTMBackend` that opens forget gates and shuts input gates (B, H, T) at padding."""

    def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        f, i = kwargs["fgate"], kwargs["igate"]
        past_end = torch.arange(f.shape[2], device=f.device) >= lengths[:, None, None]
        gates = {"fgate": f.masked_fill(past_end, 1e6), "igate": i.masked_fill(past_end, -1e30)}
        return args, kwargs | gates

    return hook


def stopped_minimax(state_cache: Any) -> Callable[..., Any]:
    """A hook after `MiniMaxLightningAttention`: S = decay^l S_0 + sum over t < l of decay^(l - 1 - t) k_t v_t."""

    def hook(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        before = state_cache.get_recurrent_state(module.layer_idx)
        dtype = state_dtype(before.dtype)
        qkv = module.act_fn(module.qkv_proj(hidden)).unflatten(2, (module.num_attention_heads, -1))
        _, k, v = qkv.to(dtype).chunk(3, dim=3)
        steps = state_cache.lengths[:, None] - 1 - torch.arange(k.shape[1], device=k.device)  # (B, T)
        rate = module.slope_rate.view(-1).to(dtype)
        weight = torch.exp(-rate * steps.clamp(min=0)[..., None]) * (steps >= 0)[..., None]
        kept = torch.exp(-rate * state_cache.lengths[:, None])[..., None, None]
        written = torch.einsum("bthn,bthp->bhnp", k * weight[..., None], v)
        state_cache.stopped.add(module.layer_idx)
        state_cache.update_recurrent_state(kept * before + written, module.layer_idx)

    return hook


def stopped_zaya(state_cache: Any) -> Callable[..., Any]:
    """A hook after `ZayaCCAProjection`: its convolution and its delayed value end at the last real token."""

    def hook(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer, lengths = module.layer_idx, state_cache.lengths
        conv, delayed = state_cache.get_conv_state(layer), state_cache.get_recurrent_state(layer)
        inputs = torch.cat([module.q_proj(hidden), module.k_proj(hidden)], dim=-1)
        state_cache.stopped.add(layer)
        state_cache.update_conv_state(last_inputs(inputs, conv, lengths), layer)
        last = last_inputs(module.v_proj_delayed(hidden), delayed[..., None], lengths)
        state_cache.update_recurrent_state(last[..., 0], layer)

    return hook
