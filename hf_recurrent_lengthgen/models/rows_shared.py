"""One sequence on several processes (context parallelism): each holds a chunk of every row, in the order of time.

What a chunk does to a state is an affine map, S_out = A S_in + B. Each process computes A and B of its own chunk. One
gather per layer shows all maps to all processes, and each folds them from the state before the whole sequence: this
gives its own exact initial state, and the state after the whole sequence. The backward pass is the reverse gather, by
autograd of `torch.distributed`. Convolutions and token shifts gather the last inputs of each chunk.

A loss is the sum over all processes. So the gradient of a parameter, or of the state before the sequence, is the sum
of the gradients of all processes, and a loss on the state after it belongs to one of them, or a share to each.

Shapes: B rows, T tokens of the chunk, F numbers of a row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .modeling_heads import IGNORED_LABEL
from .rows import Rows, changes, checked_numbers
from .scan_affine import AffineMap


@torch.compiler.disable
def read_chunk(seq_idx: Any, shape: tuple[int, int], real: Tensor | None, group: Any) -> Rows:
    """A chunk of rows that the processes of `group` share.

    Args:
        seq_idx: The number of each token's sequence, (B or 1, T), counted over the chunks; None for one sequence.
        shape: (B, T) of the chunk.
        real: (B, T) bool, true at real tokens; None if all are.
        group: The processes, in the order of time; all of them call this function.

    Returns:
        The rows; `starts` are also true at the first real token of the chunk if the one before it has another number.

    Raises:
        ValueError: for numbers of another shape or kind, or that go down.
    """
    if seq_idx is None:
        return Rows(shape, real, group=group)
    numbers = checked_numbers("seq_idx", seq_idx, shape)
    is_real = torch.ones_like(numbers, dtype=torch.bool) if real is None else real
    starts, any_real = changes(numbers, is_real), is_real.any(1)
    places = torch.arange(numbers.shape[1], device=numbers.device)
    first, last = is_real.long().argmax(1), (places * is_real).argmax(1)
    edges = [numbers.gather(1, place[:, None])[:, 0] for place in (first, last)]
    seen, before = torch.zeros_like(any_real), torch.zeros_like(first)
    chunks = gathered(torch.stack([any_real.long(), edges[1]]), group)
    for has, number in chunks[: torch.distributed.get_rank(group)]:
        seen, before = seen | has.bool(), torch.where(has.bool(), number, before)
    entered = any_real & seen
    if bool((entered & (edges[0] < before)).any()):
        raise ValueError("seq_idx goes down from one chunk to the next: count sequences over the whole row.")
    starts = starts.scatter(1, first[:, None], (entered & (edges[0] > before))[:, None])
    return Rows(shape, real, starts if bool(starts.any()) else None, group)


def scan_chunk(
    rows: Rows,
    scan: Callable[..., tuple[Tensor, Tensor]],
    affine_map: Callable[..., AffineMap],
    inputs: Sequence[Tensor],
    state: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Outputs of the chunk, and the state after the whole sequence, from the `state` before it.

    `affine_map` takes the inputs of `scan` before the state, in the dtype of the state, and its options.
    """
    assert rows.group is not None
    with torch.autocast(state.device.type, enabled=False):
        found = affine_map(*(x.to(state.dtype) for x in inputs), **options)
        factor, written = found.factor, found.written
        ends = state.new_zeros(len(state), 1)
        if rows.ended is not None:
            ended = rows.ended.view(-1, *[1] * (written.ndim - 1))
            entering, last = written.chunk(2)
            factor, written = factor[: len(entering)].masked_fill(ended, 0.0), torch.where(ended, last, entering)
            ends = rows.ended[:, None].to(state.dtype)
        flat = torch.cat([factor.flatten(1), written.flatten(1), ends], dim=1)
        maps = gathered(flat, rows.group)
        before, after = _Fold.apply(state, dist.get_rank(rows.group), found.is_matrix, factor.shape, *maps)
        before = _with_later(before, rows)
        y = None if found.read is None else found.read(before).to(inputs[0].dtype)
    return (scan(*inputs, before, **options)[0] if y is None else y), after


def _with_later(before: Tensor, rows: Rows) -> Tensor:
    """A part of the states before the sequences of the call; those that begin in the chunk start from zero."""
    return before if rows.ended is None else torch.cat([before, torch.zeros_like(before)])


# their names since torch 2.13, and before
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
        _all_gather(whole, x.contiguous(), group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(len(grad) // dist.get_world_size(ctx.group), *grad.shape[1:])
        _reduce_scatter(own, grad.contiguous(), group=ctx.group)
        return own, None


def gathered(x: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """The tensors of all processes, of one shape, in the order of their ranks; differentiable."""
    whole: Tensor = _Gather.apply(x, group)
    return whole.chunk(dist.get_world_size(group))


def inputs_before(tail: Tensor, count: Tensor, before: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The last K inputs before the rows of this chunk, and before the end of the sequence.

    Args:
        tail: The last K inputs of this chunk, (B, C, K); zeros stand before them where there are fewer.
        count: How many of these are real, (B,).
        before: The last K inputs before the whole sequence, (B, C, K).
        rows: Of this chunk.

    Returns:
        (B, C, K) each; the first (2 B, C, K) where the rows have `ended`.
    """
    assert rows.group is not None
    columns = before.shape[2]
    if rows.ended is not None:  # a sequence that began in the chunk has nothing before it
        (entering, last), ended = tail.chunk(2), rows.ended
        tail = torch.where(ended[:, None, None], last, entering)
        count = torch.where(ended, columns, count[: len(ended)])
    flat = torch.cat([tail.flatten(1), count[:, None].to(tail.dtype)], dim=1)
    places, states = torch.arange(columns, device=tail.device), [before]
    for one in gathered(flat, rows.group):
        tail, count = one[:, :-1].view_as(before), one.detach()[:, -1:].long()
        index = torch.where(places < columns - count, places + count, places + columns)
        both = torch.cat([states[-1], tail], dim=2)
        states.append(both.gather(2, index[:, None].expand_as(before)))
    # stacked: so that every process takes part in the gather of the backward pass, also the first
    stacked = torch.stack(states)
    return _with_later(stacked[dist.get_rank(rows.group)], rows), stacked[-1].clone()


class _Fold(torch.autograd.Function):
    """The states before one chunk and after all, from the state before all and the maps of all chunks, (B, F) each.

    A map is its factor, what it writes, and whether the sequence that enters ended: then nothing of the state before
    goes on, not even a NaN, which a factor of zero would let through.

    Keeps the maps and computes the states between them again: there are as many as processes.
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, rank: int, is_matrix: bool, shape: torch.Size, *maps: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state, *maps)
        ctx.rank, ctx.is_matrix, ctx.shape = rank, is_matrix, shape
        states = _folded(state, is_matrix, shape, maps)
        return states[rank].clone(), states[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_before: Tensor, grad_after: Tensor) -> tuple[Tensor | None, ...]:
        state, *maps = ctx.saved_tensors
        states = _folded(state, ctx.is_matrix, ctx.shape, maps)
        gradients, grad = [], grad_after
        for index in reversed(range(len(maps))):
            factor, _, ended = _map_of(maps[index], state, ctx.shape)
            if ctx.is_matrix:
                grad_factor, passed = states[index].mT @ grad, grad @ factor.mT
            else:
                grad_factor, passed = (states[index] * grad).sum_to_size(ctx.shape), factor * grad
            gradients.append(torch.cat([grad_factor.flatten(1), grad.flatten(1), grad.new_zeros(len(grad), 1)], dim=1))
            passed = passed.masked_fill(ended, 0.0)
            grad = passed + grad_before if index == ctx.rank else passed
        return grad, None, None, None, *reversed(gradients)


def _map_of(flat: Tensor, state: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    factor, written, ends = flat.split([shape[1:].numel(), state[0].numel(), 1], dim=1)
    return factor.view(shape), written.view_as(state), ends.bool().view(-1, *[1] * (state.ndim - 1))


def _folded(state: Tensor, is_matrix: bool, shape: torch.Size, maps: Sequence[Tensor]) -> list[Tensor]:
    states = [state]
    for flat in maps:
        factor, written, ended = _map_of(flat, state, shape)
        continued = states[-1].masked_fill(ended, 0.0)
        states.append(continued @ factor + written if is_matrix else torch.addcmul(written, factor, continued))
    return states


def check_targets(
    labels: Tensor | None, shift_labels: Tensor | None, real: Tensor | None, group: ProcessGroup
) -> None:
    """Refuse targets that a chunk of rows cannot score."""
    if labels is not None:
        raise ValueError(
            "With a sequence_group, give shift_labels in place of labels: the target of the last token is in the next "
            "chunk."
        )
    if shift_labels is None or real is None or dist.get_rank(group) == 0:
        return
    unread = real.long().cumsum(1) == 0
    if bool((unread & (shift_labels != IGNORED_LABEL)).any()):
        raise ValueError(
            "A target stands at padding in the beginning of a chunk, but its output is that of the last real token, "
            "in another chunk: set it to -100, or pad rows at their ends."
        )
