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
from .sequence_pieces import gathered

PACKING_KEYS = ("position_ids", "seq_idx")


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


@torch.compiler.disable
def sequence_starts(given: dict[str, Any], shape: tuple[int, int], real: Tensor | None) -> Tensor | None:
    """Where new sequences begin inside rows, from the positions that collators for packed rows give.

    Positions that count up are ignored, wherever they start; where they restart, a new sequence begins. Padding is
    skipped. The first real token of a row begins no new sequence: it continues from the row's initial state.

    Args:
        given: Some of `PACKING_KEYS`, (B, T) or (1, T).
        shape: (B, T).
        real: (B, T) bool, true at real tokens; None if all are.

    Returns:
        (B, T) bool; None where no sequence begins inside a row.

    Raises:
        ValueError: for positions of another shape or kind, or that contradict each other.
    """
    found: list[Tensor] = []
    for name, find in zip(PACKING_KEYS, (_restarts, _changes), strict=True):
        values = given.get(name)
        if values is None:
            continue
        if not isinstance(values, Tensor) or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(f"{name} must be a tensor of integers, got {getattr(values, 'dtype', type(values))}.")
        if values.shape not in (shape, (1, shape[1])):
            raise ValueError(f"{name} must have the shape of the tokens, {shape}, got {tuple(values.shape)}.")
        if shape[1] > 1:  # else a step of generation: nothing begins inside a row
            found.append(find(values.expand(shape), real))
    if len(found) > 1 and not torch.equal(*found):
        raise ValueError("position_ids and seq_idx begin sequences at different tokens: leave one of them out.")
    return found[0] if found and bool(found[0].any()) else None


@torch.compiler.disable
def piece_starts(numbers: Tensor, real: Tensor | None, group: Any) -> Tensor | None:
    """Where new sequences begin in this piece of rows that the processes of `group` share.

    Args:
        numbers: Of each token's sequence, (B, T), counted over the pieces.
        real: (B, T) bool, true at real tokens; None if all are.
        group: The processes, in the order of time; all of them call this function.

    Returns:
        (B, T) bool, also true at the first real token of the piece if the one before it has another number; None where
        no sequence begins in the piece.

    Raises:
        ValueError: for numbers that go down.
    """
    real = torch.ones_like(numbers, dtype=torch.bool) if real is None else real
    starts, any_real = _changes(numbers, real), real.any(1)
    places = torch.arange(numbers.shape[1], device=numbers.device)
    first, last = real.long().argmax(1), (places * real).argmax(1)
    edges = [numbers.gather(1, place[:, None])[:, 0] for place in (first, last)]
    seen, before = torch.zeros_like(any_real), torch.zeros_like(first)
    pieces = gathered(torch.stack([any_real.long(), edges[1]]), group)
    for has, number in pieces[: torch.distributed.get_rank(group)]:
        seen, before = seen | has.bool(), torch.where(has.bool(), number, before)
    entered = any_real & seen
    if bool((entered & (edges[0] < before)).any()):
        raise ValueError("seq_idx goes down from one piece to the next: count sequences over the whole row.")
    starts = starts.scatter(1, first[:, None], (entered & (edges[0] > before))[:, None])
    return starts if bool(starts.any()) else None


def _previous(values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The value at the real token before each token, how many places back it is, and which real tokens have one."""
    places = torch.arange(values.shape[1], device=values.device).expand_as(values)
    real = torch.ones_like(values, dtype=torch.bool) if real is None else real
    last_real = places.masked_fill(~real, -1).cummax(1).values
    before = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    return values.gather(1, before.clamp(min=0)), places - before, real & (before >= 0)


def _restarts(positions: Tensor, real: Tensor | None) -> Tensor:
    """Where positions restart: at 0, or at the first position of the row."""
    previous, distance, followed = _previous(positions, real)
    step = positions - previous
    starts = followed & (step != 1) & (step != distance)  # padding may be counted or not
    first = positions if real is None else positions.gather(1, real.long().argmax(1, keepdim=True))
    wrong = (starts & (positions != 0) & (positions != first[:, :1])).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise ValueError(
            f"position_ids goes from {int(previous[row, place])} to {int(positions[row, place])} at token {place} of "
            f"row {row}: a recurrent model reads tokens in order, so positions must count up by one, or restart "
            "for a new sequence, at 0 or at the first position of the row."
        )
    return starts


def _changes(numbers: Tensor, real: Tensor | None) -> Tensor:
    """Where the numbers of sequences go up."""
    previous, _, followed = _previous(numbers, real)
    if bool((followed & (numbers < previous)).any()):
        raise ValueError("seq_idx goes down: a recurrent model cannot return to an earlier sequence of the row.")
    return followed & (numbers > previous)
