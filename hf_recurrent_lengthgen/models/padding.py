"""Padding anywhere in a row: real tokens move to the front, layers skip what follows, outputs move back.

Shapes: B batch, T tokens, D channels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .sequence_pieces import Lengths, Piece, inputs_before, lengths_of


class Padding(NamedTuple):
    """How rows with padding are moved to a right-padded layout and back; all (B, T) but lengths (B,)."""

    order: Tensor
    source: Tensor
    valid: Tensor
    lengths: Tensor

    @classmethod
    def from_mask(cls, real: Tensor) -> "Padding":
        """From a boolean mask (B, T), true at real tokens."""
        lengths = real.sum(1)
        order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
        source = (real.cumsum(1) - 1).clamp(min=0)
        return cls(order, source, torch.arange(real.shape[1], device=real.device) < lengths[:, None], lengths)

    def to_front(self, x: Tensor) -> Tensor:
        """Real tokens first, in order, then zeros; (B, T, D)."""
        moved = x.gather(1, self.order[..., None].expand_as(x))
        return moved.masked_fill(~self.valid[..., None], 0.0)

    def back(self, x: Tensor) -> Tensor:
        """Inverse of `to_front`; a padding position repeats the last real token before it."""
        return x.gather(1, self.source[..., None].expand_as(x))


def zero_past_end(x: Tensor, lengths: Lengths) -> Tensor:
    """`x` (B, T, ...) with zeros at the tokens past the length of each row; unchanged without `lengths` (B,)."""
    lengths = lengths_of(lengths)
    if lengths is None:
        return x
    past_end = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(past_end.reshape(*past_end.shape, *[1] * (x.ndim - 2)), 0.0)


def last_inputs(x: Tensor, initial_state: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The last K real inputs, from x (B, T, C) and the K before it, (B, C, K), to (B, C, K)."""
    state_columns = initial_state.shape[2]
    if lengths is None and x.shape[1] >= state_columns:
        final_state = x[:, x.shape[1] - state_columns :].mT
    else:
        columns = torch.cat([initial_state.mT, x.to(initial_state.dtype)], dim=1)
        ends = lengths if lengths is not None else torch.full((x.shape[0],), x.shape[1], device=x.device)
        index = ends[:, None] + torch.arange(state_columns, device=x.device)
        final_state = columns.gather(1, index[..., None].expand(-1, -1, x.shape[2])).mT
    # a copy: a view would keep the whole input alive as long as the state
    return final_state.to(initial_state.dtype, copy=True)


def inputs_around(inputs: Sequence[Tensor], initial_state: Tensor, lengths: Lengths = None) -> tuple[Tensor, Tensor]:
    """The last K real inputs before and after the T tokens.

    Args:
        inputs: Parts (B, T, C_i) of what is carried, which stand one below the other in the state.
        initial_state: The last K inputs before the sequence, (B, C, K).
        lengths: Real tokens of each row, (B,); None if all are; a `Piece` where processes share the sequence.

    Returns:
        (B, C, K) each; the second after the whole sequence.
    """
    parts = initial_state.split([x.shape[2] for x in inputs], dim=1)
    if not isinstance(lengths, Piece):
        return initial_state, joined([last_inputs(x, part, lengths) for x, part in zip(inputs, parts, strict=True)], 1)
    rows, length = inputs[0].shape[:2]
    real = lengths.lengths
    tails = [
        last_inputs(x, part.new_zeros(rows, *part.shape[1:]), real) for x, part in zip(inputs, parts, strict=True)
    ]
    count = torch.full((rows,), length, device=initial_state.device) if real is None else real
    before, after = inputs_before(joined(tails, 1), count.clamp(max=initial_state.shape[2]), initial_state, lengths)
    return lengths.with_later(before), after


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` that makes no copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
