"""Chunked forms of recurrences that read their state before they write it, in plain torch.

In a chunk that starts with the state S_0, what a token reads depends on what earlier tokens wrote. Readers and writers
meet in lower triangular products M with the decays between them, and what is read is the solution of a triangular
system (the UT transform of Yang et al. 2024, arXiv:2406.06484, section 3; with decays, arXiv:2412.06464, section 3.3).
Its adjoint is the transposed system, backwards in time. Shape suffixes as in scan_backends.py, and Z = chunks * B * H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from .chunk_decays import Decays, GateGradient, below_diagonal, chunk_groups, from_chunks, to_chunks


class ChunkedDeltaScan(torch.autograd.Function):
    """A recurrence over chunks, with a backward pass that recomputes them from every few states.

    `rule` (`DeltaRule` or `LowRank`) has the equations of a chunk, `inputs` are its arguments, (B, T, H, X) each, or
    (B, T, G, X) if each of G groups serves H / G heads one after another.
    """

    @staticmethod
    def forward(
        ctx: Any, rule: type[DeltaRule | LowRank], chunk_size: int, initial_state: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        (batch, length), (_, heads, width, _) = inputs[0].shape[:2], initial_state.shape
        size, groups = chunk_groups(length, initial_state, chunk_size)
        y = initial_state.new_empty(batch, length, heads, width)
        state, starts, (room,) = initial_state.flatten(0, 1), [], _rooms(1, initial_state, groups)
        for group, tokens in groups:
            chunks = rule(*(to_chunks(t[:, tokens], size, heads // t.shape[2]) for t in inputs))
            states = room[: group.stop - group.start + 1]
            states[0] = state
            starts.append(state)
            _, written = advance(chunks, states)
            state = states[-1].clone()  # the others are made again in the backward pass
            y[:, tokens] = from_chunks(chunks.outputs(written, states[:-1].flatten(0, 1)), y[:, tokens])
        ctx.save_for_backward(*inputs, *starts)
        ctx.rule, ctx.size, ctx.groups = rule, size, groups
        return y, state.view(initial_state.shape).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_y.device.type, enabled=False):  # also where backward() is called inside autocast
            return ChunkedDeltaScan._backward(ctx, grad_y, grad_final)

    @staticmethod
    def _backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        groups, saved = ctx.groups, ctx.saved_tensors
        inputs, starts = saved[: -len(groups)], saved[-len(groups) :]
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]
        repeats = [grad_y.shape[2] // t.shape[2] for t in inputs]
        grad_state, rooms = grad_final.flatten(0, 1), _rooms(2, grad_final, groups)
        for (group, tokens), start in zip(reversed(groups), reversed(starts), strict=True):
            parts = (to_chunks(t[:, tokens], ctx.size, n) for t, n in zip(inputs, repeats, strict=True))
            chunks = ctx.rule(*parts)
            states, grad_states = (room[: group.stop - group.start + 1] for room in rooms)
            states[0], grad_states[-1] = start, grad_state
            read, written = advance(chunks, states)
            dy = to_chunks(grad_y[:, tokens], ctx.size)
            d_written, d_read = retreat(chunks, dy, grad_states)
            grad_state = grad_states[0].clone()
            through = states[:-1].flatten(0, 1), grad_states[1:].flatten(0, 1)
            found = chunks.gradients(dy, d_written, d_read, read, written, *through)
            for out, gradient, n in zip(gradients, found, repeats, strict=True):
                out[:, tokens] = from_chunks(gradient, out[:, tokens], n)
        return None, None, grad_state.view(grad_final.shape), *gradients


def _rooms(number: int, state_BHPN: Tensor, groups: Sequence[tuple[slice, slice]]) -> list[Tensor]:
    """Memory for the states around the chunks of a group, (chunks + 1, B*H, P, N), made once: fresh pages are slow."""
    return [state_BHPN.new_empty(groups[0][0].stop + 1, *state_BHPN.flatten(0, 1).shape) for _ in range(number)]


def advance(chunks: _Rule, states: Tensor) -> tuple[Tensor, Tensor]:
    """r and w, (Z, Q, P) each; fills the states around the chunks, (1 + chunks, B*H, P, N), from the first on."""
    read, written, pairs = torch.empty_like(chunks.known), torch.empty_like(chunks.known), chunks.pairs
    parts = (read, written, chunks.known, chunks.solve, pairs.starts[1], pairs.total, *chunks.values, *pairs.writes)
    for start, end, (r, w, known, solve, reader, total, *rest) in zip(
        states[:-1], states[1:], _by_chunk(len(states) - 1, *parts), strict=True
    ):
        torch.baddbmm(known, reader, start.mT, out=r)
        torch.bmm(solve, r, out=w)
        torch.mul(start, total, out=end)
        values = w, *rest[: len(chunks.values)]
        for value, writer in zip(values, rest[len(chunks.values) :], strict=True):
            end.baddbmm_(value.mT, writer)
    return read, written


def retreat(chunks: _Rule, dy: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of w but for what comes through r, and of r; fills those of the states, from the last one back."""
    pairs, count = chunks.pairs, len(grad_states) - 1
    grad_states[:-1].flatten(0, 1).baddbmm_(dy.mT, pairs.starts[0], beta=0)
    d_written = torch.bmm(pairs.M[0][0].mT, dy)
    d_read = torch.empty_like(d_written)
    parts = _by_chunk(count, d_read, d_written, chunks.solve, pairs.starts[1], pairs.writes[0], pairs.total)
    steps = list(zip(grad_states[:-1], grad_states[1:], parts, strict=True))
    for start, end, (dr, dw, solve, reader, writer, total) in reversed(steps):
        dw.baddbmm_(writer, end.mT)
        torch.bmm(solve.mT, dw, out=dr)
        start.addcmul_(end, total).baddbmm_(dr.mT, reader)
    return d_written, d_read


def _by_chunk(count: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each chunk its parts, (Z, ...) -> (B*H, ...)."""
    return zip(*(t.unflatten(0, (count, -1)).unbind(0) for t in parts), strict=True)


class _Rule:
    """Chunks of a recurrence: what a token reads of the state, r, and what it writes, w, (Z, Q, P) each.

    Of `pairs`, the queries are the first reader, and w goes to the first writer:

        r = known + starts_1 S_0^T        w = solve r

    Attributes:
        pairs: Products of readers and writers.
        known: What is known of r before the states.
        solve: (Z, Q, Q).
        values: What the other writers write.
    """

    pairs: ScalarPairs | ChannelPairs
    known: Tensor
    solve: Tensor
    values: Sequence[Tensor] = ()

    def outputs(self, written: Tensor, starts: Tensor) -> Tensor:
        """y, (Z, Q, P)."""
        y = torch.bmm(self.pairs.starts[0], starts.mT)
        for M, value in zip(self.pairs.M[0], (written, *self.values), strict=True):
            y.baddbmm_(M, value)
        return y


class DeltaRule(_Rule):
    """Chunks of S_t = S_{t-1} diag(exp(g_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and y_t = S_t q_t.

    u_t = v_t - S_{t-1} diag(exp(g_t)) k_t is what is wrong about the value of a key, and w_t = beta_t u_t is written.
    With M_ij = -k_i^T diag(decay from j to i) k_j for j < i, u = r + M w:

        w = diag(beta) (I - M diag(beta))^-1 r        r = v - (d k) S_0^T
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
        self.q, self.k, self.known = q, k, v
        pairs = ScalarPairs if g.shape[2] == 1 else ChannelPairs
        self.pairs = pairs(g, [q, -k], [k], exclusive=False)
        self.pairs.M[0][0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        self.solve = _inverse(self.pairs.M[1][0] * -beta.mT).mul_(beta)  # beta is (Z, Q, 1)

    def gradients(
        self, dy: Tensor, dw: Tensor, dr: Tensor, r: Tensor, w: Tensor, starts: Tensor, grad_ends: Tensor
    ) -> Sequence[Tensor]:
        """Of q, k, v, g and beta."""
        (dq, dk_read), (dk,), dg = self.pairs.gradients([dy, dr], [w], starts, grad_ends)
        own, M = (dy * w).sum(-1, keepdim=True), self.pairs.M[1][0]
        dq.addcmul_(own, self.k)
        dk.sub_(dk_read).addcmul_(own, self.q)
        dbeta = (dw.baddbmm_(M.mT, dr) * r.baddbmm_(M, w)).sum(-1, keepdim=True)
        return dq, dk, dr, dg, dbeta


class LowRank(_Rule):
    """Chunks of S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + v_t k_t^T and y_t = S_t q_t.

    w_t = S_{t-1} a_t is what is read, and written. A reader a does not see its own gate, so all decays end before
    their token, and the other reader is exp(g) q:

        w = (I - M_ab)^-1 r        r = M_ak v + (d a) S_0^T
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> None:
        self.q, self.gate, self.writers, self.values = q, g.exp(), (b, k), (v,)
        self.pairs = ChannelPairs(g, [q * self.gate, a], self.writers, exclusive=True)
        for M, writer in zip(self.pairs.M[0], self.writers, strict=True):
            M.diagonal(dim1=1, dim2=2).copy_((q * writer).sum(-1))
        self.solve, self.known = _inverse(-self.pairs.M[1][0]), torch.bmm(self.pairs.M[1][1], v)

    def gradients(
        self, dy: Tensor, dw: Tensor, dr: Tensor, r: Tensor, w: Tensor, starts: Tensor, grad_ends: Tensor
    ) -> Sequence[Tensor]:
        """Of q, k, v, g, a and b."""
        M, values = self.pairs.M, (w, *self.values)
        dv = torch.bmm(M[0][1].mT, dy).baddbmm_(M[1][1].mT, dr).baddbmm_(self.pairs.writes[1], grad_ends.mT)
        (dq, da), (db, dk), dg = self.pairs.gradients([dy, dr], values, starts, grad_ends)
        dq.mul_(self.gate)
        dg.addcmul_(dq, self.q)
        for value, writer, gradient in zip(values, self.writers, (db, dk), strict=True):
            own = (dy * value).sum(-1, keepdim=True)
            dq.addcmul_(own, writer)
            gradient.addcmul_(own, self.q)
        return dq, dk, dv, dg, da, db


def _inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of matrices (Z, Q, Q), which count below their diagonal only."""
    identity = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    return solve_triangular(lower, identity, upper=False, unitriangular=True)


Tensors = Sequence[Tensor]


class PairGradients(NamedTuple):
    """Of readers, writers and gates, (Z, Q, N) each; gates as they were given."""

    readers: Tensors
    writers: Tensors
    gates: Tensor


class _Pairs:
    """Readers (Z, Q, N) meet earlier writers in their chunk, with the decays between them.

    Args:
        g: Gates, (Z, Q, N) or (Z, Q, 1).
        readers: Each sees the decays up to its token, with its own or, if `exclusive`, without.
        writers: Their decays begin after their token.

    Attributes:
        M: Products of each reader and writer, [reader][writer] (Z, Q, Q), zero from the diagonal on.
        starts: Readers, decayed from the start of their chunk.
        writes: Writers, decayed to the end of their chunk.
        total: Decay over the chunk, (Z, 1, N) or (Z, 1, 1).
    """

    M: Sequence[Tensors]

    def __init__(self, g: Tensor, readers: Tensors, writers: Tensors, exclusive: bool) -> None:
        self.exclusive, self.decays = exclusive, Decays(g, exclusive)
        self.readers, self.writers = readers, writers
        self.starts = [t * self.decays.from_start for t in readers]
        self.writes = [t * self.decays.to_end for t in writers]
        self.total = self.decays.total[:, None]

    def _around(self, outs: Tensors, values: Tensors, starts: Tensor, grad_ends: Tensor) -> tuple[Tensors, Tensors]:
        """What `starts` and `writes` pass on to the gradients of readers and writers."""
        d_readers = [torch.bmm(out, starts).mul_(self.decays.from_start) for out in outs]
        return d_readers, [torch.bmm(value, grad_ends).mul_(self.decays.to_end) for value in values]

    def gradients(self, outs: Tensors, values: Tensors, starts: Tensor, grad_ends: Tensor) -> PairGradients:
        """What M, `starts` and `writes` pass on; overwrites the states `starts`.

        Args:
            outs: Gradients of what each reader reads, (Z, Q, P).
            values: What each writer writes, (Z, Q, P).
            starts: States before the chunks, (Z, P, N).
            grad_ends: Gradients of the states after them.
        """
        raise NotImplementedError


class ScalarPairs(_Pairs):
    """With one gate per head: each product is a matrix product times the decays; never `exclusive`."""

    def __init__(self, g: Tensor, readers: Tensors, writers: Tensors, exclusive: bool) -> None:
        super().__init__(g, readers, writers, exclusive)
        assert not exclusive
        self.between = g.new_zeros(len(g), g.shape[1], g.shape[1])
        for b, (to_middle, from_middle) in self.decays.levels.items():
            block = below_diagonal(self.between, b)
            block.copy_((from_middle * to_middle.mT).view(block.shape))
        self.M = [[torch.bmm(r, w.mT).mul_(self.between) for w in writers] for r in readers]

    def gradients(self, outs: Tensors, values: Tensors, starts: Tensor, grad_ends: Tensor) -> PairGradients:
        d_readers, d_writers = self._around(outs, values, starts, grad_ends)
        of_readers, of_writers = (
            torch.stack([(d * t).sum(2) for d, t in zip(d, of, strict=True)]).sum(0)
            for d, of in ((d_readers, self.readers), (d_writers, self.writers))
        )
        inside = torch.zeros_like(self.between)
        for out, reader, d_reader, row in zip(outs, self.readers, d_readers, self.M, strict=True):
            for value, writer, d_writer, M in zip(values, self.writers, d_writers, row, strict=True):
                dM = torch.bmm(out, value.mT)
                inside.addcmul_(dM, M)
                dM.mul_(self.between)
                d_reader.baddbmm_(dM, writer)
                d_writer.baddbmm_(dM.mT, reader)
        before = torch.ones_like(inside[0]).triu_(1)  # 1 where the writer of a row is before the token of a column
        gates = (inside.tril_(-1).flatten(0, 1) @ before).view_as(inside).tril_().sum(1)
        gates += of_readers @ (1 - before).to(gates) + of_writers @ before
        through = starts.mul_(grad_ends).flatten(1).sum(1, keepdim=True) * self.total[:, 0]
        return PairGradients(d_readers, d_writers, (gates + through)[..., None])


class ChannelPairs(_Pairs):
    """With a gate per channel: products are built by halving the chunk, as in `ChunkedGatedScan`."""

    def __init__(self, g: Tensor, readers: Tensors, writers: Tensors, exclusive: bool) -> None:
        super().__init__(g, readers, writers, exclusive)
        self.joined = torch.stack([*readers], 2), torch.stack([*writers], 2)
        (count, size, R, _), W = self.joined[0].shape, len(writers)
        M = g.new_zeros(R, W, count, size, size)
        for b in self.decays.levels:
            right, left, *_ = self._level(b)
            product = torch.bmm(right, left.mT).view(count, -1, b, R, b, W)
            below_diagonal(M.flatten(0, 2), b).unflatten(0, M.shape[:3]).copy_(product.permute(3, 5, 0, 1, 2, 4))
        self.M = [row.unbind(0) for row in M.unbind(0)]

    def _level(self, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Readers in right halves and writers in left halves of blocks of 2b, decayed to the middle; these decays."""
        to_middle, from_middle = (t[:, :, None] for t in self.decays.levels[b])
        right, left = _half(self.joined[0], b, 1) * from_middle, _half(self.joined[1], b, 0) * to_middle
        return right.flatten(1, 2), left.flatten(1, 2), to_middle, from_middle

    def gradients(self, outs: Tensors, values: Tensors, starts: Tensor, grad_ends: Tensor) -> PairGradients:
        d_readers, d_writers = self._around(outs, values, starts, grad_ends)
        (count, size, R, _), W = self.joined[0].shape, len(self.writers)
        of_readers, of_writers = (
            torch.stack([d * t for d, t in zip(d, of, strict=True)]).sum(0)
            for d, of in ((d_readers, self.readers), (d_writers, self.writers))
        )
        through = starts.mul_(grad_ends).sum(1) * self.total[:, 0]
        gates = GateGradient(of_readers, of_writers, through, self.exclusive)
        dM = torch.bmm(torch.stack([*outs], 2).flatten(1, 2), torch.stack([*values], 2).flatten(1, 2).mT)
        dM = dM.view(count, size, R, size, W).permute(2, 4, 0, 1, 3).contiguous()
        d_right, d_left = (torch.stack([*d], 2) for d in (d_readers, d_writers))
        for b in reversed(self.decays.levels):
            right, left, to_middle, from_middle = self._level(b)
            block = below_diagonal(dM.flatten(0, 2), b).unflatten(0, dM.shape[:3]).permute(2, 3, 4, 0, 5, 1)
            block = block.reshape(-1, R * b, W * b)
            to_right = torch.bmm(block, left).unflatten(1, (b, R))
            to_left = torch.bmm(block.mT, right).unflatten(1, (b, W))
            _half(d_right, b, 1).addcmul_(to_right, from_middle)
            _half(d_left, b, 0).addcmul_(to_left, to_middle)
            gates.add(b, to_right.mul_(right.view_as(to_right)).sum(2), to_left.mul_(left.view_as(to_left)).sum(2))
        for total, parts in ((d_right, d_readers), (d_left, d_writers)):
            for index, part in enumerate(parts):
                part.copy_(total[:, :, index])
        return PairGradients(d_readers, d_writers, gates.result())


def _half(t_ZQXN: Tensor, b: int, which: int) -> Tensor:
    """The left (0) or right (1) halves of all blocks of 2b tokens, a view (Z * Q/2b, b, X, N)."""
    return t_ZQXN.view(-1, 2, b, *t_ZQXN.shape[2:])[:, which]
