"""Adapters that put states into the different caches of Transformers and read them back.

Almost all models take a `Cache` of `LinearAttentionLayer`s. MiniMax and xLSTM have their own caches. `registry.py`
lists which model type has which.
"""

import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from hf_recurrent_lengthgen.hybrids.mixers import Mamba1StateCache, limited_steps, scans_from_state
from hf_recurrent_lengthgen.hybrids.rows import StockRows
from hf_recurrent_lengthgen.hybrids.sharing import Shared
from hf_recurrent_lengthgen.hybrids.state_cache import Overwritten, StateCache
from hf_recurrent_lengthgen.hybrids.stopping import scans_of_rows, stopped_xlstm
from hf_recurrent_lengthgen.models.configuration_stateful import OLD_CACHE_NAMES
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, state_dtype

# What a layer of a stock cache holds about its keys; `cumulative_length` counts tokens that left a sliding window.
KEY_ATTRIBUTES = ("keys", "values", "is_initialized", "cumulative_length", "dtype", "device")


class CacheAdapter:
    """A `Cache` of `LinearAttentionLayer`s.

    Args:
        model: The model that takes it.

    Attributes:
        argument: The name of the cache in the arguments and the output of the model's `forward`.
        arguments: The names that it may have.
        reads_prompts: Whether a mixer that reads several tokens from a stock cache starts from its recurrent state.
        skips_padding: Whether the stock model leaves out the padding before its tokens where it fills a cache.
        reads_padding: Whether the stock `generate` is right after padding.
        shares: Whether processes can share rows: the layers read and write their states through the cache.
        why_not_stop: Why states cannot stop before the padding at the end of a row, in words; empty where they can.
        rounds: Whether mixers need the recurrent state in the dtype of the model. A bfloat16 model then rounds it
            between calls, as the stock model does.
    """

    arguments: ClassVar[tuple[str, ...]] = ("cache", *OLD_CACHE_NAMES)
    reads_prompts: ClassVar[bool] = True
    skips_padding: ClassVar[bool] = True
    reads_padding: ClassVar[bool] = True
    shares: ClassVar[bool] = True
    why_not_stop: ClassVar[str] = ""
    rounds: ClassVar[bool] = False

    def __init__(self, model: HybridModel) -> None:
        parameters = inspect.signature(type(model).forward).parameters
        self.model, self.argument = model, next(name for name in self.arguments if name in parameters)
        self.dtype = model.dtype if self.rounds else None

    def state_cache(
        self,
        state: RecurrentState | None,
        single_token: bool,
        attention: Cache | None,
        rows: Rows | None = None,
        shared: Shared | None = None,
    ) -> Any:
        """A state cache with `state` before the tokens; keys and values go to `attention`, if given.

        With `rows`, the state after the tokens is that after the real ones. With `shared`, the tokens are a piece of
        rows that processes share, and `state` is that before the whole rows.
        """
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return self.state_cache_class()(layers, state, single_token, attention, self.dtype, shared, rows)

    def state_cache_class(self) -> type[StateCache]:
        return StateCache

    def mixers(self, state_cache: Any) -> AbstractContextManager[None]:
        """The context in which the mixers run with the state cache, also when they are recomputed."""
        if state_cache.shared is not None or state_cache.rows is not None:
            return scans_of_rows(self.model, state_cache)
        return limited_steps(self.model) if state_cache.single_token else nullcontext()

    def to_cache(self, state: RecurrentState) -> Any:
        """A stock cache that starts from `state`; it may keep this state and write to it."""
        cache = DynamicCache(config=self.model.config)
        stock_layers: list[Any] = cache.layers
        layers = zip(stock_layers, state, self.model._layout.shapes, self.model._layout.dropped_columns, strict=True)
        for layer, (recurrent, conv), shape, dropped in layers:
            if shape.conv != (0,):
                layer.update_conv_state(F.pad(conv, (dropped, 0)).to(self.model.dtype))
            if shape.recurrent != (0,):
                layer.update_recurrent_state(recurrent.to(self.dtype or recurrent.dtype))
        return cache


class RoundingCacheAdapter(CacheAdapter):
    """The usual cache, for mixers that need states in the dtype of the model."""

    shares = False
    rounds = True
    why_not_stop = "its mixers keep the last values of a row, whatever they are"


class Mamba1CacheAdapter(CacheAdapter):
    """The usual cache, for mixers that do not read its recurrent state by themselves."""

    reads_prompts = False

    def state_cache_class(self) -> type[StateCache]:
        return Mamba1StateCache

    def mixers(self, state_cache: Any) -> AbstractContextManager[None]:
        return scans_from_state(self.model, state_cache)


class MiniMaxCacheAdapter(RoundingCacheAdapter):
    """MiniMax's own cache, which replaces its states instead of writing to them."""

    reads_padding = False
    why_not_stop = "its recurrence is inside a larger function, which takes no lengths"

    def state_cache_class(self) -> type[StateCache]:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        class MiniMaxStateCache(StateCache, MiniMaxCache):
            def get_linear_cache(self, layer_idx: int) -> Tensor | None:
                return self.get_recurrent_state(layer_idx)

            def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
                self.update_recurrent_state(linear_cache, layer_idx)

        return MiniMaxStateCache

    def to_cache(self, state: RecurrentState) -> Any:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        cache = MiniMaxCache()
        for index, (shape, layer) in enumerate(zip(self.model._layout.shapes, state, strict=True)):
            if shape.recurrent != (0,):
                cache.set_linear_cache(index, layer.recurrent.to(self.model.dtype))
        return cache


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

    def __init__(self, state: RecurrentState, key_dim: int, rows: Rows | None = None) -> None:
        """Take (B, H, N*P + N + 1) of every layer."""
        self.rows = rows
        self.attending: dict[int, list[tuple[int, int]]] = {}
        self.dropped_columns = [0] * len(state)
        self.seqlen_offset = 0
        self.rnn_state = _Latest([_unpacked(layer.recurrent, key_dim) for layer in state])

    def final_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        empty = torch.empty(batch_size, 0, device=device, dtype=dtype)
        return tuple(LayerState(_packed(parts).to(dtype), empty) for parts in self.rnn_state.states)


class XlstmCacheAdapter(CacheAdapter):
    shares = False
    skips_padding = False

    def state_cache(
        self,
        state: RecurrentState | None,
        single_token: bool,
        attention: Cache | None,
        rows: Rows | None = None,
        shared: Shared | None = None,
    ) -> Any:
        config, dtype = self.model.config, state_dtype(self.model.dtype)
        if state is None:
            size = config.qk_head_dim * (config.v_head_dim + 1) + 1
            zero = torch.zeros(1, config.num_heads, size, device=self.model.device, dtype=dtype)
            state = (LayerState(zero, zero.new_empty(1, 0)),) * config.num_hidden_layers
        return XlstmStateCache(state, config.qk_head_dim, rows)

    def mixers(self, state_cache: Any) -> AbstractContextManager[None]:
        if (rows := state_cache.rows) is None:
            return nullcontext()
        return stopped_xlstm(self.model, rows)

    def to_cache(self, state: RecurrentState) -> Any:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        memory = state[0].recurrent
        cache: Any = xLSTMCache(self.model.config, memory.shape[0], memory.dtype, str(self.model.device))
        cache.is_compileable, cache.is_linear = False, [True]  # generate asks for both
        cache.holds_state = True  # also if it is zero
        key_dim = self.model.config.qk_head_dim
        cache.rnn_state = {i: tuple(_unpacked(layer.recurrent, key_dim)) for i, layer in enumerate(state)}
        return cache


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """One tensor (B, H, N*P + N + 1) of an xLSTM layer's three."""
    memory, normalizer, stabilizer = parts
    return torch.cat([memory.flatten(2), normalizer, stabilizer], dim=-1)


def _unpacked(packed: Tensor, key_dim: int) -> list[Tensor]:
    memory, normalizer, stabilizer = packed.split([packed.shape[-1] - 1 - key_dim, key_dim, 1], dim=-1)
    return [memory.unflatten(-1, (key_dim, -1)), normalizer, stabilizer]


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
                value = getattr(source, name)
                setattr(target, name, value.detach().clone() if isinstance(value, Tensor) else value)


def rows_of_keys(attention: Any, rows: Tensor, behind: Tensor | None = None) -> Any:
    """A copy of an attention cache with these rows, in the order given, and with padding `behind` them (`windows`)."""
    taken = copy.copy(attention)
    taken.layers = [copy.copy(layer) for layer in attention.layers]
    for layer in taken.layers:
        layer.behind = behind
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
    return taken


@contextmanager
def keys_of_sequences(attention: Any, rows: StockRows | None) -> Iterator[Any]:
    """A cache for the N sequences of B rows; after the block, `attention` has the keys of the last one of each row.

    A sequence that begins inside a row has no keys before it: all columns of the cache are padding to it.
    """
    if attention is None or rows is None:
        yield attention
        return
    (owners,), last = rows.moved.owners, rows.moved.last
    behind = torch.zeros_like(owners) if rows.padded is None else rows.length - cast(Tensor, rows.padded.lengths)
    padding = getattr(attention, "padding", torch.zeros_like(last))
    read = rows_of_keys(attention, owners.clamp(max=len(last) - 1), behind)
    read.padding = torch.cat([padding, padding.new_tensor([attention.get_seq_length()])])[owners]
    yield read
    attention.layers, attention.padding = rows_of_keys(read, last).layers, (read.padding + behind)[last]
