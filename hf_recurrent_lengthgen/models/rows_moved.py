"""Rows as layers get them: each one sequence, with padding at its end only; and what layers do at these ends.

Real tokens move to the front of their row, and outputs move back. The sequences of packed rows become rows of their
own. Rows of similar length (within a factor of 2) form a group, so that padding is less than half of a group however
unequal the sequences are. A layer runs one group after the other within one call, so that processes that shard layers
stay in step.

Shapes: B rows, T tokens, N sequences, L tokens of the longest sequence of a group, C or D channels, K columns.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configuration_stateful import optional_module
from .rows import Rows
from .state_value import LayerState, layer_state


class MovedRows(NamedTuple):
    """How rows are moved to rows of one sequence each, in groups, and back.

    Attributes:
        orders: For each group the token, of B * T, at each of its places; (N, L).
        groups: The rows of each group as layers get them, None where all tokens are real.
        owners: For each group the row of which each sequence is the first, B for others; (N,). Empty where sequences
            are the rows.
        source: The place of each token among the concatenated places of the groups; (B, T).
        last: The last sequence of each row among the concatenated sequences of the groups; (B,).
    """

    orders: tuple[Tensor, ...]
    groups: tuple[Rows | None, ...]
    owners: tuple[Tensor, ...]
    source: Tensor
    last: Tensor

    @classmethod
    def of(cls, rows: Rows) -> "MovedRows | None":
        """How rows are moved for layers; None where they are whole sequences of real tokens."""
        if rows.starts is not None:
            return cls.of_sequences(rows)
        return None if rows.real is None else cls.of_padded(rows)

    @classmethod
    def of_padded(cls, rows: Rows) -> "MovedRows":
        """The same rows with padding, in whatever place (`real`), at their ends."""
        real: Any = rows.real
        length = real.shape[1]
        begins = length * torch.arange(len(real), device=real.device)[:, None]
        order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
        source = (real.cumsum(1) - 1).clamp(min=0)
        moved = Rows.of_lengths(real.sum(1), length)._replace(group=rows.group)
        return cls((order + begins,), (moved,), (), source + begins, begins[:0, 0])

    @classmethod
    @torch.compiler.disable
    def of_sequences(cls, whole: Rows, together: bool = False) -> "MovedRows":
        """The sequences of rows, with `starts` or `real`.

        Where processes share the rows, their first real tokens may begin a sequence, too. The first group then has the
        B sequences that enter, and the B last ones that begin in the rows, or nothing. With `together` there is one
        group, whatever the lengths.
        """
        like: Any = whole.real if whole.starts is None else whole.starts
        starts = torch.zeros_like(like) if whole.starts is None else whole.starts
        real = torch.ones_like(like) if whole.real is None else whole.real
        rows, device, shared = len(starts), starts.device, whole.group is not None
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
        apart = set(ends.tolist()) if shared else {len(size) - 1}
        members: dict[int, list[int]] = {}
        for index, length in enumerate(size.tolist()):
            if index not in apart:
                members.setdefault(0 if together else max(length - 1, 0).bit_length(), []).append(index)
        groups = [torch.tensor(indices, device=device) for indices in members.values()]
        groups = [ends, *groups] if shared else groups
        orders, moved = [], []
        offset, places = torch.empty_like(size), 0
        for group in groups:
            steps = torch.arange(max(1, int(size[group].max())), device=device)
            orders.append(tokens[(before[group][:, None] + steps).clamp(max=len(tokens) - 1)])
            valid = steps < size[group][:, None]
            shape = (len(group), len(steps))
            moved.append(None if bool(valid.all()) else Rows(shape, valid))
            offset[group] = places + len(steps) * torch.arange(len(group), device=device)
            places += orders[-1].numel()
        members_of = torch.cat(groups)
        if shared:
            moved[0] = (moved[0] or Rows((2 * rows, orders[0].shape[1])))._replace(group=whole.group, ended=ended)
        rank = torch.empty_like(size).scatter(0, members_of, torch.arange(len(members_of), device=device))
        return cls(
            tuple(orders),
            tuple(moved),
            tuple(owner[group] for group in groups),
            (offset[sequence] + place).view_as(starts),
            rank[last],
        )

    @property
    def _is_shared(self) -> bool:
        return self.groups[0] is not None and self.groups[0].ended is not None

    def to_front(self, x: Tensor) -> tuple[Tensor, ...]:
        """The sequences of x, (B, T, D), followed by zeros; (N, L, D) for each group."""
        flat = x.flatten(0, 1)
        return tuple(zero_past_end(flat[order], rows) for order, rows in zip(self.orders, self.groups, strict=True))

    def back(self, groups: tuple[Tensor, ...]) -> Tensor:
        """Inverse of `to_front`; a padding position repeats the last real token before it."""
        return torch.cat([x.flatten(0, 1) for x in groups])[self.source]

    def starting_states(self, state: LayerState, new: LayerState | None = None) -> tuple[LayerState, ...]:
        """For each group the state of its sequences: that of the row for the first one of a row, `new` for others.

        `new` has one row; None is zero.
        """
        if not self.owners:
            return (state,)
        new = layer_state(part.new_zeros(1, *part.shape[1:]) for part in state) if new is None else new
        padded = [torch.cat([part, other]) for part, other in zip(state, new, strict=True)]
        found = [layer_state(part[owner] for part in padded) for owner in self.owners]
        return tuple([state, *found[1:]] if self._is_shared else found)

    def final_states(self, states: tuple[LayerState, ...]) -> LayerState:
        """The state after the last sequence of each row."""
        if not self.owners or self._is_shared:
            return states[0]
        return layer_state(torch.cat(parts)[self.last] for parts in zip(*states, strict=True))


def over_groups(forward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Let the `forward` of a layer take tuples of hidden states, states and rows too, one entry for each group.

    Its results are then such tuples. A further input is one tensor for all groups, or such a tuple.
    """

    @wraps(forward)
    def run(self: Any, hidden_states: Any, state: Any, rows: Any = None, *inputs: Any) -> Any:
        if isinstance(hidden_states, Tensor):
            return forward(self, hidden_states, state, rows, *inputs)
        results = [
            forward(self, *group, *(each[index] if isinstance(each, tuple) else each for each in inputs))
            for index, group in enumerate(zip(hidden_states, state, rows, strict=True))
        ]
        return tuple(zip(*results, strict=True))

    return run


def zero_past_end(x: Tensor, rows: Rows | None) -> Tensor:
    """`x` (B, T, ...) with zeros at padding."""
    if rows is None or rows.real is None:
        return x
    return x.masked_fill(~rows.real.reshape(*rows.real.shape, *[1] * (x.ndim - 2)), 0.0)


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


def inputs_around(inputs: Sequence[Tensor], initial_state: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
    """The last K real inputs before and after the T tokens.

    Args:
        inputs: Parts (B, T, C_i) of what is carried, which stand one below the other in the state.
        initial_state: The last K inputs before the sequence, (B, C, K).
        rows: As layers get them.

    Returns:
        (B, C, K) each; the second after the whole sequence.
    """
    parts = initial_state.split([x.shape[2] for x in inputs], dim=1)
    lengths = None if rows is None else rows.lengths
    if rows is None or rows.group is None:
        return initial_state, joined([last_inputs(x, part, lengths) for x, part in zip(inputs, parts, strict=True)], 1)
    batch, length = inputs[0].shape[:2]
    tails = [
        last_inputs(x, part.new_zeros(batch, *part.shape[1:]), lengths) for x, part in zip(inputs, parts, strict=True)
    ]
    real = torch.full((batch,), length, device=initial_state.device) if lengths is None else lengths
    count = real.clamp(max=initial_state.shape[2])
    return optional_module("rows_shared").inputs_before(joined(tails, 1), count, initial_state, rows)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` that makes no copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
