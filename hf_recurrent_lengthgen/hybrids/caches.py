"""What a hybrid keeps of a text, as values: `HybridCache` between two calls, `CallCache` within one.

Nothing is written in place. A call reads from the value before it and puts what comes after it beside that, so that
gradients flow through states, keys and values, and activation checkpointing recomputes from the same value.

Keys and values (B, H, n, D) are those of the last n tokens, aligned at the last one: where rows have read unequally
many tokens, the shorter ones have columns before their first token that attention does not see.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.hybrids.sharing import Shared
from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import inputs_around
from hf_recurrent_lengthgen.models.state_value import LayerShape, LayerState, RecurrentState, detach_state, take_rows


class Layout(NamedTuple):
    """What a forward pass of one token shows of a model.

    Attributes:
        shapes: Of the state of every layer, without B.
        attending: Heads and size of keys and values, of the layers with attention.
        windows: W of every layer with sliding attention in the stock model, else None.
    """

    shapes: tuple[LayerShape, ...]
    attending: dict[int, list[tuple[int, int]]]
    windows: tuple[int | None, ...]


class KeyLayer:
    """Keys and values of one layer, in the parts in which they were read; no parts without attention.

    Parts stay apart while gradients are needed, so that each is in memory once however many calls follow.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.parts = tuple(parts)

    @property
    def keys(self) -> Tensor | None:
        return self._part(0)

    @property
    def values(self) -> Tensor | None:
        return self._part(1)

    def _part(self, which: int) -> Tensor | None:
        return _joined(self.parts)[which] if self.parts else None

    @property
    def columns(self) -> int:
        return sum(keys.shape[2] for keys, _ in self.parts)


class HybridCache(RecurrentCache):
    """The recurrent state, keys and values after the tokens seen so far. Every call replaces them.

    A shallow copy (`copy.copy`) is a value of its own: reading on from it leaves the other as it is.

    Args:
        layers: Number of layers.
        state: The state to start from; None for that before any token. An attention cache needs none.

    Attributes:
        layers: A `KeyLayer` for every layer.
        position: Tokens of the text, of the longest row, whose keys were read, also if they have left a window.
        lengths: The same of every row, (B,), where rows differ; else None.
        window: The window to which keys were shortened.
        before: Tokens that were read before those of this cache, as `position` counts.
    """

    def __init__(self, layers: int, state: RecurrentState | None = None) -> None:
        super().__init__(state)
        self.layers: list[Any] = [KeyLayer() for _ in range(layers)]
        self.position, self.before, self.window = 0, 0, None
        self.lengths: Tensor | None = None

    def __copy__(self) -> "HybridCache":
        copied = object.__new__(type(self))
        copied.__dict__ = self.__dict__ | {"layers": [KeyLayer(layer.parts) for layer in self.layers]}
        return copied

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"HybridCache(layers={len(self)}, tokens_seen={self.tokens_seen}, position={self.position})"

    @property
    def columns(self) -> int:
        """Columns of the layer that keeps the most."""
        return max((layer.columns for layer in self.layers), default=0)

    @property
    def rows(self) -> int | None:
        """B; None if nothing was read."""
        held = [part for layer in self.layers for keys in layer.parts for part in keys]
        held += [] if self.state is None else [self.state[0].conv]
        return len(held[0]) if held else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text that were read."""
        return max(self.position, self.tokens_seen)

    def row_lengths(self, device: Any = None, rows: int | None = None) -> Tensor:
        """`lengths`, also where they are equal."""
        if self.lengths is not None:
            return self.lengths
        held = next((keys for layer in self.layers for keys, _ in layer.parts), None)
        held = self.state[0].conv if held is None and self.state is not None else held
        rows, device = (rows, device) if held is None else (len(held), held.device)
        return torch.full((rows or 0,), self.position, device=device)

    def replaced(self, keys: dict[int, tuple[Tensor, Tensor]], position: int, lengths: Tensor | None = None) -> Any:
        """The cache itself, with these keys and values in place of its own."""
        self.layers = [KeyLayer([keys[index]] if index in keys else ()) for index in range(len(self.layers))]
        self.position, self.lengths = position, lengths
        return self

    def taken(self, rows: Tensor | slice) -> "HybridCache":
        """A cache with these rows, in the order given."""

        def take(x: Tensor) -> Tensor:
            if isinstance(rows, slice):
                return x if range(len(x))[rows] == range(len(x)) else x[rows].clone()
            return x[rows.to(x.device)]

        chosen = copy.copy(self)
        chosen.layers = [KeyLayer([(take(k), take(v)) for k, v in layer.parts]) for layer in self.layers]
        chosen.lengths = None if self.lengths is None else take(self.lengths)
        chosen.state = None if self.state is None else take_rows(self.state, rows)
        return chosen

    def detached(self) -> "HybridCache":
        """The same values without gradient history."""
        copied = copy.copy(self)
        parts = ([tuple(x.detach() for x in part) for part in layer.parts] for layer in self.layers)
        copied.layers = [KeyLayer(each) for each in parts]
        copied.state = None if self.state is None else detach_state(self.state)
        return copied

    def kept(self, keep: Tensor) -> "HybridCache":
        """A cache in which only the rows where `keep` (B,) is true have read anything."""
        kept = copy.copy(self)
        kept._set_lengths(torch.where(keep, self.row_lengths(keep.device, len(keep)), 0))
        return kept

    def become(self, other: "HybridCache") -> None:
        """Hold what another cache holds."""
        self.__dict__ |= copy.copy(other).__dict__

    @classmethod
    def joined(cls, caches: Sequence["HybridCache"]) -> "HybridCache":
        """One cache with the rows of several, without their states."""
        whole = copy.copy(caches[0])
        if len(caches) > 1:
            whole.layers = [_stacked(same) for same in zip(*(cache.layers for cache in caches), strict=True)]
            whole._set_lengths(torch.cat([cache.row_lengths() for cache in caches]))
        return whole

    def batch_select_indices(self, indices: Tensor) -> None:
        self.become(self.taken(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows is not None and repeats > 1:
            self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def reset(self) -> None:
        super().reset()
        self.replaced({}, 0)
        self.before, self.window = 0, None

    def advance_keys(self, call: "CallCache", tokens: int, limits: Sequence[int | None], rows: Any = None) -> None:
        """Put the keys and values after a call in place of those before it.

        Args:
            call: The call, which has read from this cache.
            tokens: T.
            limits: How many each layer keeps; None for all.
            rows: How the rows of the call were moved (`rows.StockRows`), if they were.
        """
        lengths, behind, last = None, None, None
        before: Any = call.lengths_before
        if rows is not None:
            last, tokens = rows.moved.last, rows.length
            real = torch.full_like(before, tokens) if call.lengths is None else call.lengths
            behind, lengths = tokens - real, (real + before)[last]
        elif self.lengths is not None:
            lengths = self.lengths + tokens
        for index in range(len(self.layers)):
            if (new := call.new_keys.get(index)) is None:
                continue
            parts: Any = (*call.keys[index].parts, new)
            if behind is not None:
                whole = _joined(parts)
                places = torch.arange(sum(k.shape[2] for k, _ in parts), device=behind.device)
                places = (places - behind[:, None]).clamp(min=0)[:, None, :, None]
                parts = (tuple(x.take_along_dim(places, 2)[last] for x in whole),)
            self.layers[index] = KeyLayer(_shortened(parts, limits[index]))
        if lengths is None:
            self.position += tokens
        else:
            self._set_lengths(lengths)

    def _set_lengths(self, lengths: Tensor) -> None:
        """Take these tokens of each row for what it has read, and drop columns that are padding in all rows."""
        self.position = int(lengths.max())
        self.layers = [KeyLayer(_shortened(layer.parts, self.position)) for layer in self.layers]
        self.lengths = None if bool((lengths == self.position).all()) else lengths


def _joined(parts: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of several parts."""
    if len(parts) == 1:
        return tuple(parts[0])
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


def _stacked(layers: Sequence[KeyLayer]) -> KeyLayer:
    """The rows of several layers, with columns before the shorter ones."""
    if not layers[0].parts:
        return layers[0]
    columns = max(layer.columns for layer in layers)
    parts: Any = ([getattr(layer, name) for layer in layers] for name in ("keys", "values"))
    padded = (torch.cat([pad(x, (0, 0, columns - x.shape[2], 0)) for x in part]) for part in parts)
    return KeyLayer([(next(padded), next(padded))])


def _shortened(parts: Any, limit: int | None) -> Any:
    """The last `limit` columns, in memory of their own; in one part, unless a gradient needs the parts."""
    total = sum(keys.shape[2] for keys, _ in parts)
    if limit is not None and total > limit:
        return (tuple(x[:, :, total - limit :].clone() for x in _joined(parts)),)
    if len(parts) < 2 or any(keys.requires_grad for keys, _ in parts):
        return tuple(parts)
    return (_joined(parts),)


class CallCache(Cache):
    """The cache that the stock model gets in one call.

    Args:
        layout: Of the model.
        before: The state before the tokens; None for nothing.
        cache: Keys and values before them, one row for each row of the call; None for none.
        rows: Rows with padding at their ends, as layers get them; None without padding.
        shared: What shares the rows with other processes; None where nothing does.
        dtype: In which stock mixers get their states.

    Attributes:
        after: The states after the tokens, by layer.
        new_keys: Keys and values of the tokens, by layer.
        columns: Columns of a long row that each layer of xLSTM has read, which Transformers cuts in evaluation.
        unstopped: Layers with states that have read the padding, too.
    """

    is_compileable = False

    def __init__(
        self,
        layout: Layout,
        before: RecurrentState | None,
        cache: HybridCache | None = None,
        rows: Rows | None = None,
        shared: Shared | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.layout, self.before, self.dtype, self.shared = layout, before, dtype, shared
        self.keys: list[KeyLayer] = [KeyLayer()] * len(layout.windows) if cache is None else list(cache.layers)
        self.lengths_before = None if cache is None else cache.lengths
        self.offset = 0 if cache is None else cache.columns
        self.rows = rows if shared is None else shared.rows
        self.lengths = None if rows is None else rows.lengths
        self.after: dict[int, LayerState] = {}
        self.new_keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.columns: dict[int, int] = {}
        self.unstopped: set[int] = set()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self.layout.windows)

    def before_layer(self, layer_idx: int) -> LayerState | None:
        """The state before the tokens; None at the start."""
        return None if self.before is None else self.before[layer_idx]

    def keep(self, layer_idx: int, state: LayerState) -> None:
        """Note the state after the tokens."""
        if not self.is_closed:
            self.after[layer_idx] = state

    def close(self) -> None:
        """End the call: what activation checkpointing computes again from here on is not kept."""
        self.is_closed = True
        self.after, self.new_keys = {}, {}

    def final_state(self, rows: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The state after the tokens; a part that a layer lacks is (B, 0)."""
        empty = torch.empty(rows, 0, device=device, dtype=dtype)
        states = (self.after.get(index, LayerState(empty, empty)) for index in range(len(self)))
        return tuple(LayerState(*(_alone(part.to(dtype)) for part in state)) for state in states)

    # states, as the mixers of Transformers ask for them

    def _part(self, layer_idx: int, name: str, state_idx: int) -> Tensor | None:
        if state_idx:
            raise ValueError("Layers with several convolution or recurrent states are not supported.")
        part = None if self.before is None else getattr(self.before[layer_idx], name)
        if part is None or part.shape[1:] == (0,):
            return None
        return part.to(self.dtype or part.dtype).clone()  # one token may be written into it

    def _put(self, layer_idx: int, **parts: Tensor) -> None:
        some = next(iter(parts.values()))
        state = self.after.get(layer_idx) or LayerState(*[some.new_empty(len(some), 0)] * 2)
        self.keep(layer_idx, state._replace(**parts))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The columns before the first token, (B, C, K-1)."""
        return self._part(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state before the first token."""
        return self._part(layer_idx, "recurrent", state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The new columns (B, C, T) after those before them, (B, C, K-1 + T). Without K, the columns to keep."""
        if conv_kernel_size is None:
            self._put(layer_idx, conv=conv_states)
            return conv_states
        initial = self._part(layer_idx, "conv", state_idx)
        if initial is None:
            initial = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size - 1)
        before, after = inputs_around([conv_states.mT], initial, self.rows)
        self._put(layer_idx, conv=after)
        return torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Note the recurrent state after the tokens."""
        self._put(layer_idx, recurrent=recurrent_states)
        if self.rows is not None:
            self.unstopped.add(layer_idx)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state before the tokens."""
        return self.before is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that mixers do not use the convolution step that writes in place."""
        return True

    @property
    def rnn_state(self) -> "CallCache":
        """Where xLSTM looks for the state of a layer."""
        return self

    def __getitem__(self, layer_idx: int) -> "_OfXlstm":
        return _OfXlstm(self, layer_idx)

    # keys and values

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """The keys and values to attend to."""
        new = key_states, value_states
        if not self.is_closed:
            self.new_keys[layer_idx] = new
        if self.shared is not None:
            return tuple(map(self.shared.up_to_here, new))
        return _joined((*self.keys[layer_idx].parts, new))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of keys before the first token."""
        return self.offset if self.shared is None else self.shared.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys, and column of the first key."""
        attends = layer_idx in self.layout.attending  # else it stands for those that do, before Transformers 5.23
        before = self.keys[layer_idx].columns if attends else self.offset
        before = before if self.shared is None else self.shared.before
        return before + query_length, self.get_seq_length() - before

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [window is not None for window in self.layout.windows]

    @property
    def is_linear(self) -> list[bool]:
        return [index not in self.layout.attending for index in range(len(self))]

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)


class _OfXlstm:
    """The three states of a layer, for `XlstmBackend`; of no length, so that the model copies nothing into them."""

    def __init__(self, call: CallCache, layer_idx: int) -> None:
        self.parts = (call, layer_idx), None, None

    def __iter__(self) -> Any:
        return iter(self.parts)

    def __len__(self) -> int:
        return 0


def _alone(part: Tensor) -> Tensor:
    """The tensor in its own memory, if it is a view of a larger one such as the states of all chunks."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
