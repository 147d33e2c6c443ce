"""How states go into the different caches of Transformers and come out of them.

Almost all models take a `Cache` of `LinearAttentionLayer`s; MiniMax and xLSTM have caches of their own,
RWKV-4 a list of tensors.
"""

import copy
import functools
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from hf_recurrent_lengthgen.hybrids.forgetting import forgetting_scans
from hf_recurrent_lengthgen.hybrids.mixers import Mamba1StateCache, limited_steps, scans_from_state
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.hybrids.state_cache import Overwritten, StateCache
from hf_recurrent_lengthgen.models.forgetting import Forgetting
from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState, state_dtype

# What a layer of a stock cache holds about its keys; `cumulative_length` counts tokens that left a sliding window.
KEY_ATTRIBUTES = ("keys", "values", "is_initialized", "cumulative_length", "dtype", "device")


class HoldsState(Protocol):
    """What goes through a forward pass in the place of a cache."""

    attending: set[int]
    dropped_columns: list[int]

    def final_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The state after the tokens; a part that a layer lacks is (B, 0)."""


class CacheAdapter:
    """A `Cache` of `LinearAttentionLayer`s.

    Args:
        argument: Its name among the arguments of `forward`.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def state_cache(
        self, model: Any, state: RecurrentState | None, single_token: bool, attention: Cache | None
    ) -> HoldsState:
        """A state_cache with `state` before the tokens; keys and values go to `attention`, if given."""
        layers = _text_config(model).num_hidden_layers
        return self.cache_class()(layers, state, single_token, attention, _rounded_to(model))

    def cache_class(self) -> type[StateCache]:
        """The class of the state_cache."""
        return StateCache

    def mixers(self, model: Any, state_cache: Any) -> AbstractContextManager[None]:
        """What must hold while the state_cache passes through the mixers, also when they are recomputed."""
        rule = Forgetting.of(model.config)
        if rule != Forgetting():
            return forgetting_scans(model, rule, state_cache)
        return limited_steps(model) if state_cache.single_token else nullcontext()

    def to_cache(self, model: Any, state: RecurrentState) -> Any:
        """A stock cache that starts from `state`, which it may keep and write to."""
        cache = DynamicCache(config=model.config)
        stock_layers: list[Any] = cache.layers
        layers = zip(stock_layers, state, model._layout.shapes, model._layout.dropped_columns, strict=True)
        for layer, (recurrent, conv), shape, dropped in layers:
            if shape.conv != (0,):
                layer.update_conv_state(F.pad(conv, (dropped, 0)).to(model.dtype))
            if shape.recurrent != (0,):
                layer.update_recurrent_state(recurrent.to(_rounded_to(model) or recurrent.dtype))
        return cache

    def from_cache(self, model: Any, cache: Any) -> RecurrentState:
        """A copy of the states in a stock cache.

        Raises:
            ValueError: if the cache has not read any token.
        """
        state = []
        for index, (shape, dropped) in enumerate(
            zip(model._layout.shapes, model._layout.dropped_columns, strict=True)
        ):
            recurrent = cache.layers[index].recurrent_states[0] if shape.recurrent != (0,) else None
            conv = cache.layers[index].conv_states[0] if shape.conv != (0,) else None
            state.append((recurrent, None if conv is None else conv[..., dropped:]))
        return _filled(model, state)


def _rounded_to(model: Any) -> torch.dtype | None:
    """The dtype that the model rounds its recurrent states to; None if it keeps them as they are."""
    family = SUPPORTED.get(_text_config(model).model_type)
    return model.dtype if family is not None and family.model_dtype else None


class Mamba1CacheAdapter(CacheAdapter):
    """The usual cache, for mixers that must be made to use it."""

    def cache_class(self) -> type[StateCache]:
        return Mamba1StateCache

    def mixers(self, model: Any, state_cache: Any) -> AbstractContextManager[None]:
        return scans_from_state(model, state_cache)


class MiniMaxCacheAdapter(CacheAdapter):
    """MiniMax's own cache, which replaces its states instead of writing to them."""

    def cache_class(self) -> type[StateCache]:
        """A state_cache that MiniMax takes for its cache."""
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        class MiniMaxStateCache(StateCache, MiniMaxCache):
            def get_linear_cache(self, layer_idx: int) -> Tensor | None:
                return self.get_recurrent_state(layer_idx)

            def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
                self.update_recurrent_state(linear_cache, layer_idx)

        return MiniMaxStateCache

    def to_cache(self, model: Any, state: RecurrentState) -> Any:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        cache = MiniMaxCache()
        for index, (shape, layer) in enumerate(zip(model._layout.shapes, state, strict=True)):
            if shape.recurrent != (0,):
                cache.set_linear_cache(index, layer.recurrent.to(model.dtype))
        return cache

    def from_cache(self, model: Any, cache: Any) -> RecurrentState:
        held = [shape.recurrent != (0,) for shape in model._layout.shapes]
        state = [(cache.linear_cache[index] if holds else None, None) for index, holds in enumerate(held)]
        return _filled(model, state)


class _Slot:
    """One of the five tensors (B, D, L) of an RWKV-4 state, with separate values before and after the tokens."""

    def __init__(self, initial: list[Tensor], final: list[Tensor | None]) -> None:
        self.initial, self.final = initial, final

    def __getitem__(self, place: tuple) -> Tensor:
        return self.initial[place[-1]]

    def __setitem__(self, place: tuple, value: Tensor) -> None:
        self.final[place[-1]] = value


class RwkvStateCache(list):
    """Carries a state through RWKV-4, which takes a list of five tensors: two token shifts and the three of wkv."""

    def __init__(self, state: RecurrentState, single_token: bool, dtype: torch.dtype) -> None:
        """Take (B, 3, D) and (B, 2 D, 1) of every layer; `dtype` is that of the token shifts."""
        self.attending: set[int] = set()
        self.dropped_columns = [0] * len(state)
        initial: list[list[Tensor]] = [[] for _ in range(5)]
        for recurrent, conv in state:
            attention, feed_forward = conv[..., 0].to(dtype).chunk(2, dim=1)
            shifts = (feed_forward, attention)
            # With one token the model does not index the time, so the shift needs that dimension itself.
            parts = [shift[:, None] if single_token else shift for shift in shifts] + list(recurrent.unbind(1))
            for values, part in zip(initial, parts, strict=True):
                values.append(part)
        super().__init__(_Slot(values, [None] * len(state)) for values in initial)

    def final_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The state after the tokens."""
        return tuple(
            LayerState(
                torch.stack([numerator, denominator, exponent], dim=1).to(dtype),
                torch.cat([attention, feed_forward], dim=1)[..., None].to(dtype),
            )
            for feed_forward, attention, numerator, denominator, exponent in zip(
                *(slot.final for slot in self), strict=True
            )
        )


class RwkvCacheAdapter(CacheAdapter):
    """The list of five tensors of RWKV-4."""

    def __init__(self) -> None:
        super().__init__("state")

    def mixers(self, model: Any, state_cache: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def state_cache(
        self, model: Any, state: RecurrentState | None, single_token: bool, attention: Cache | None
    ) -> HoldsState:
        if state is None:
            config, dtype = model.config, state_dtype(model.dtype)
            sizes = {"recurrent": (1, 3, config.hidden_size), "conv": (1, 2 * config.hidden_size, 1)}
            zero = LayerState(**{k: torch.zeros(v, device=model.device, dtype=dtype) for k, v in sizes.items()})
            state = (zero,) * config.num_hidden_layers
        return RwkvStateCache(state, single_token, model.dtype)

    def to_cache(self, model: Any, state: RecurrentState) -> Any:
        if state[0].recurrent.shape[0] > 1:
            raise ValueError("Transformers' RWKV-4 generates wrongly with more than one row: give one row at a time.")
        tensors = (slot.initial for slot in RwkvStateCache(state, False, model.dtype))
        return [torch.stack(parts, dim=-1) for parts in tensors]

    def from_cache(self, model: Any, cache: Any) -> RecurrentState:
        final = RwkvStateCache(model.zero_state(cache[0].shape[0]), False, model.dtype)
        for slot, tensor in zip(final, cache, strict=True):
            slot.final = list(tensor.detach().clone().unbind(-1))
        return final.final_state(cache[0].shape[0], model.device, state_dtype(model.dtype))


class _Latest:
    """The three states of every xLSTM layer, which the model reads by layer and overwrites with `copy_`."""

    def __init__(self, states: list[list[Tensor]]) -> None:
        self.states = states

    def __getitem__(self, layer: int) -> tuple[Tensor, ...]:
        latest = self.states[layer]
        return tuple(
            Overwritten.of(part, layer, functools.partial(latest.__setitem__, index))
            for index, part in enumerate(latest)
        )


class XlstmStateCache:
    """Carries a state through xLSTM: matrix memory (B, H, N, P), normalizer (B, H, N) and stabilizer (B, H, 1)."""

    def __init__(self, state: RecurrentState, key_dim: int) -> None:
        """Take (B, H, N*P + N + 1) of every layer."""
        self.attending: set[int] = set()
        self.dropped_columns = [0] * len(state)
        self.seqlen_offset = 0
        self.rnn_state = _Latest([_unpacked(layer.recurrent, key_dim) for layer in state])

    def final_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The state after the tokens."""
        empty = torch.empty(batch_size, 0, device=device, dtype=dtype)
        return tuple(LayerState(_packed(parts).to(dtype), empty) for parts in self.rnn_state.states)


class XlstmCacheAdapter(CacheAdapter):
    """xLSTM's own cache."""

    def state_cache(
        self, model: Any, state: RecurrentState | None, single_token: bool, attention: Cache | None
    ) -> HoldsState:
        config, dtype = model.config, state_dtype(model.dtype)
        if state is None:
            size = config.qk_head_dim * (config.v_head_dim + 1) + 1
            zero = torch.zeros(1, config.num_heads, size, device=model.device, dtype=dtype)
            state = (LayerState(zero, zero.new_empty(1, 0)),) * config.num_hidden_layers
        return XlstmStateCache(state, config.qk_head_dim)

    def mixers(self, model: Any, state_cache: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def to_cache(self, model: Any, state: RecurrentState) -> Any:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        cache: Any = xLSTMCache(model.config, state[0].recurrent.shape[0], state[0].recurrent.dtype, model.device)
        cache.is_compileable = False  # generate asks for it
        key_dim = model.config.qk_head_dim
        cache.rnn_state = {i: tuple(_unpacked(layer.recurrent, key_dim)) for i, layer in enumerate(state)}
        return cache

    def from_cache(self, model: Any, cache: Any) -> RecurrentState:
        return _filled(model, [(_packed(cache.rnn_state[i]), None) for i in range(len(model.state_shapes()))])


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """One tensor (B, H, N*P + N + 1) of an xLSTM layer's three."""
    memory, normalizer, stabilizer = parts
    return torch.cat([memory.flatten(2), normalizer, stabilizer], dim=-1)


def _unpacked(packed: Tensor, key_dim: int) -> list[Tensor]:
    """Inverse of `_packed`."""
    memory, normalizer, stabilizer = packed.split([packed.shape[-1] - 1 - key_dim, key_dim, 1], dim=-1)
    return [memory.unflatten(-1, (key_dim, -1)), normalizer, stabilizer]


OWN_CACHES: dict[str, type[CacheAdapter]] = {"minimax": MiniMaxCacheAdapter, "xlstm": XlstmCacheAdapter}


def cache_adapter_of(model: Any) -> CacheAdapter:
    """The adapter of a model.

    Raises:
        ValueError: if it takes no cache.
    """
    model_type = _text_config(model).model_type
    if model_type == "rwkv":
        return RwkvCacheAdapter()
    parameters = inspect.signature(type(model).forward).parameters
    for argument in ("past_key_values", "cache_params"):
        if argument in parameters:
            family = SUPPORTED.get(model_type)
            usual = Mamba1CacheAdapter if family is not None and family.mamba1 else CacheAdapter
            return OWN_CACHES.get(model_type, usual)(argument)
    raise ValueError(f"{type(model).__name__} takes no cache, so nothing can carry its states.")


def copy_keys(attention: Cache, cache: Any) -> None:
    """Put the keys and values of an attention cache into a stock cache of the same model.

    Raises:
        ValueError: if the stock cache cannot say how many tokens it has read.
    """
    if type(cache) is not DynamicCache:
        raise ValueError(
            f"Transformers cannot continue a text from a {type(cache).__name__} with keys, because it loses the "
            "positions: call the model itself with initial_state and attention_cache."
        )
    for source, target in zip(attention.layers, cache.layers, strict=True):
        for name in KEY_ATTRIBUTES:
            if hasattr(source, name):
                setattr(target, name, copy.deepcopy(getattr(source, name)))


def repeated_keys(attention: Cache, copies: int) -> Cache:
    """A copy of an attention cache with every row `copies` times."""
    repeated: Any = copy.deepcopy(attention)
    for layer in repeated.layers:
        if getattr(layer, "keys", None) is not None:
            layer.batch_repeat_interleave(copies)
    return repeated


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _filled(model: Any, state: Sequence[tuple[Tensor | None, Tensor | None]]) -> RecurrentState:
    """Copies in our dtype, (B, 0) for parts that a layer lacks."""
    given = [part for layer in state for part in layer if part is not None]
    if not given:
        raise ValueError("The cache has read no token, so it holds no state: use zero_state.")
    empty = given[0].new_empty(given[0].shape[0], 0)
    dtype = state_dtype(model.dtype)
    return tuple(
        LayerState(*((empty if part is None else part).detach().to(dtype, copy=True) for part in layer))
        for layer in state
    )
