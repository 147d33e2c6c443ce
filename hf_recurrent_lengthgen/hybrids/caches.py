"""What a hybrid keeps of a text between two calls, as a value; `call_cache.CallCache` is that within one.

Nothing is written in place. A call reads from the value before it and makes a new value, so that
gradients flow through states, keys and values, and activation checkpointing recomputes from the same value.

Keys and values (B, H, n, D) are those of the last n tokens, aligned at the last one: where rows have read unequally
many tokens, the shorter ones have columns before their first token that attention does not see.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.models.state_value import RecurrentState, detach_state, take_rows


class KeyLayer:
    """Keys and values of one layer, in the parts in which they were read; no parts without attention.

    Parts stay apart while gradients are needed, so that each is in memory once however many calls follow.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.parts = tuple(parts)

    @property
    def keys(self) -> Tensor | None:
        return joined_parts(self.parts)[0] if self.parts else None

    @property
    def values(self) -> Tensor | None:
        return joined_parts(self.parts)[1] if self.parts else None

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
        held = self._held()
        return None if held is None else len(held)

    def _held(self) -> Tensor | None:
        """A tensor of all rows."""
        state = None if self.state is None else self.state[0].conv
        return next((keys for layer in self.layers for keys, _ in layer.parts), state)

    def check_rows(self, rows: int) -> None:
        """Raise a `ValueError` for another number of rows."""
        if self.rows not in (None, rows):
            raise ValueError(f"The cache has {self.rows} rows, not {rows}: give the same rows to both.")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text that were read."""
        return max(self.position, self.tokens_seen)

    def row_lengths(self, device: Any = None, rows: int | None = None) -> Tensor:
        """`lengths`, also where they are equal."""
        if self.lengths is not None:
            return self.lengths
        held = self._held()
        rows, device = (rows, device) if held is None else (len(held), held.device)
        return torch.full((rows or 0,), self.position, device=device)

    def replaced(self, keys: dict[int, tuple[Tensor, Tensor]], position: int, lengths: Tensor | None = None) -> Any:
        """The cache itself, with these keys and values in place of its own."""
        self.layers = [KeyLayer([keys[index]] if index in keys else ()) for index in range(len(self.layers))]
        self.position, self.lengths = position, lengths
        return self

    def taken(self, rows: Tensor | slice) -> "HybridCache":
        """A cache with these rows, in that order."""

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
        copied.layers = [KeyLayer([(k.detach(), v.detach()) for k, v in layer.parts]) for layer in self.layers]
        copied.state = None if self.state is None else detach_state(self.state)
        return copied

    def kept(self, keep: Tensor) -> "HybridCache":
        """A cache in which only the rows where `keep` (B,) is true have read anything."""
        copied = copy.copy(self)
        copied._set_lengths(torch.where(keep, self.row_lengths(keep.device, len(keep)), 0))
        return copied

    def become(self, other: "HybridCache") -> None:
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

    def advance_keys(self, call: Any, tokens: int, limits: Sequence[int | None], rows: Any = None) -> None:
        """Put the keys and values after a call in place of those before it.

        Args:
            call: The `CallCache` of the call, which has read from this cache.
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
                whole = joined_parts(parts)
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


def joined_parts(parts: Any) -> tuple[Tensor, Tensor]:
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
    parts = zip(*(joined_parts(layer.parts) for layer in layers), strict=True)  # keys, and values
    keys, values = (torch.cat([pad(x, (0, 0, columns - x.shape[2], 0)) for x in part]) for part in parts)
    return KeyLayer([(keys, values)])


def _shortened(parts: Any, limit: int | None) -> Any:
    """The last `limit` columns, in memory of their own; in one part, unless a gradient needs the parts."""
    total = sum(keys.shape[2] for keys, _ in parts)
    if limit is not None and total > limit:
        return (tuple(x[:, :, total - limit :].clone() for x in joined_parts(parts)),)
    if len(parts) < 2 or any(keys.requires_grad for keys, _ in parts):
        return tuple(parts)
    return (joined_parts(parts),)
