"""Packed rows: where each sequence of a row begins, and a new state there.

The sequences of packed rows become rows of their own, padded on the right. Rows of similar length (within a factor of
2) form a group, so that padding is less than half of a group however unequal the sequences are. A layer runs one group
after the other within one call, so that processes that shard layers stay in step.

Shapes: B rows, T tokens, N sequences, L tokens of the longest sequence of a group, D channels.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recurrent_state import LayerState, layer_state


class Packing(NamedTuple):
    """How the sequences of packed rows are moved to rows of their own, in groups, and back.

    Attributes:
        orders: For each group the token, of B * T, at each of its places; (N, L).
        valid: For each group whether a sequence has that place; (N, L).
        lengths: Tokens of each sequence of each group, (N,); None for a group without padding.
        owners: For each group the row of which each sequence is the first, B for others; (N,).
        source: The place of each token among the concatenated places of the groups; (B, T).
        last: The last sequence of each row among the concatenated sequences of the groups; (B,).
        ended: (B,) bool, where rows are pieces of sequences (`Piece`): the sequence that enters the row ends in it.
            The first group then has the B sequences that enter, and the B last ones that begin in the rows, or
            nothing.
    """

    orders: tuple[Tensor, ...]
    valid: tuple[Tensor, ...]
    lengths: tuple[Tensor | None, ...]
    owners: tuple[Tensor, ...]
    source: Tensor
    last: Tensor
    ended: Tensor | None = None

    @classmethod
    @torch.compiler.disable
    def from_starts(cls, starts: Tensor, real: Tensor, pieces: bool = False, together: bool = False) -> "Packing":
        """From boolean masks (B, T): the real tokens, and those that begin a sequence inside a row (at least one).

        If rows are `pieces` of sequences, their first real tokens may begin one, too. With `together` there is one
        group, whatever the lengths, and no sequence needs to begin inside a row.
        """
        rows, device = len(starts), starts.device
        inside = starts.cumsum(1)
        last = inside[:, -1].add(1).cumsum(0) - 1  # sequences of each row, the one that enters it among them
        first = last - inside[:, -1]
        sequence = (inside + first[:, None]).flatten()
        tokens, read = real.flatten().nonzero()[:, 0], real.flatten().cumsum(0)
        tokens = tokens if len(tokens) else tokens.new_zeros(1)
        size = torch.zeros(int(last[-1]) + 2, dtype=torch.long, device=device)  # behind the others: nothing
        size.index_add_(0, sequence, real.flatten().long())
        before = size.cumsum(0) - size  # real tokens before each sequence
        place = (read - 1 - before[sequence]).clamp(min=0)
        owner = torch.full_like(size, rows).scatter(0, first, torch.arange(rows, device=device))

        ended = last > first
        ends = torch.cat([first, torch.where(ended, last, len(size) - 1)])
        apart = set(ends.tolist()) if pieces else {len(size) - 1}
        members: dict[int, list[int]] = {}
        for index, length in enumerate(size.tolist()):
            if index not in apart:
                members.setdefault(0 if together else max(length - 1, 0).bit_length(), []).append(index)
        groups = [torch.tensor(indices, device=device) for indices in members.values()]
        groups = [ends, *groups] if pieces else groups
        orders, valid, lengths = [], [], []
        offset, places = torch.empty_like(size), 0
        for group in groups:
            steps = torch.arange(max(1, int(size[group].max())), device=device)
            orders.append(tokens[(before[group][:, None] + steps).clamp(max=len(tokens) - 1)])
            valid.append(steps < size[group][:, None])
            lengths.append(None if bool(valid[-1].all()) else size[group])
            offset[group] = places + len(steps) * torch.arange(len(group), device=device)
            places += orders[-1].numel()
        members_of = torch.cat(groups)
        rank = torch.empty_like(size).scatter(0, members_of, torch.arange(len(members_of), device=device))
        return cls(
            tuple(orders),
            tuple(valid),
            tuple(lengths),
            tuple(owner[group] for group in groups),
            (offset[sequence] + place).view_as(starts),
            rank[last],
            ended if pieces else None,
        )

    def to_front(self, x: Tensor) -> tuple[Tensor, ...]:
        """The sequences of x, (B, T, D), followed by zeros; (N, L, D) for each group."""
        flat = x.flatten(0, 1)
        return tuple(
            flat[order].masked_fill(~valid[..., None], 0.0)
            for order, valid in zip(self.orders, self.valid, strict=True)
        )

    def back(self, groups: tuple[Tensor, ...]) -> Tensor:
        """Inverse of `to_front`; a padding position repeats the last real token before it."""
        return torch.cat([x.flatten(0, 1) for x in groups])[self.source]

    def starting_states(self, state: LayerState, new: LayerState | None = None) -> tuple[LayerState, ...]:
        """For each group the state of its sequences: that of the row for the first one of a row, `new` for others.

        `new` has one row; None is zero.
        """
        new = layer_state(part.new_zeros(1, *part.shape[1:]) for part in state) if new is None else new
        padded = [torch.cat([part, other]) for part, other in zip(state, new, strict=True)]
        found = [layer_state(part[owner] for part in padded) for owner in self.owners]
        return tuple(found if self.ended is None else [state, *found[1:]])

    def final_states(self, states: tuple[LayerState, ...]) -> LayerState:
        """The state after the last sequence of each row."""
        if self.ended is not None:
            return states[0]
        return layer_state(torch.cat(parts)[self.last] for parts in zip(*states, strict=True))


def over_groups(forward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Let the `forward` of a layer take tuples of hidden states, states and lengths too, one entry for each group.

    Its results are then such tuples. A further input is one tensor for all groups, or such a tuple.
    """

    @wraps(forward)
    def run(self: Any, hidden_states: Any, state: Any, lengths: Any = None, *inputs: Any) -> Any:
        if isinstance(hidden_states, Tensor):
            return forward(self, hidden_states, state, lengths, *inputs)
        results = [
            forward(self, *group, *(given[index] if isinstance(given, tuple) else given for given in inputs))
            for index, group in enumerate(zip(hidden_states, state, lengths, strict=True))
        ]
        return tuple(zip(*results, strict=True))

    return run
