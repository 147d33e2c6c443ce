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

from .scan_backends import backward_once
from .scan_decays import Decays, GateGradient, below_diagonal, chunk_groups, from_chunks, to_chunks


class ChunkedDeltaScan(torch.autograd.Function):
    """A recurrence over chunks, with a backward pass that recomputes them from every few states and what was solved.

    `rule` (`DeltaRule` or `LowRank`) has the equations of a chunk, `inputs` are its arguments, (B, T, H, X) each, or
    (B, T, G, X) if each of G groups serves H / G heads one after another; the values come first.
    """

    @staticmethod
    def forward(
        ctx: Any, rule: type[DeltaRule | LowRank], chunk_size: int, initial_state: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        (batch, length), (_, heads, width, _) = inputs[0].shape[:2], initial_state.shape
        size, groups = chunk_groups(length, initial_state, chunk_size)
        y = initial_state.new_empty(batch, length, heads, width)
        state, starts, solutions, (room,) = initial_state.flatten(0, 1), [], [], _rooms(1, initial_state, groups)
        for group, tokens in groups:
            chunks = rule(*(to_chunks(t[:, tokens], size, heads // t.shape[2]) for t in inputs))
            states = room[: group.stop - group.start + 1]
            states[0] = state
            starts.append(state)
            reads, solved = advance(chunks, states)
            solutions.append(solved)
            state = states[-1].clone()  # the others are made again in the backward pass
            from_chunks(chunks.outputs(reads), y[:, tokens])
        ctx.save_for_backward(*inputs, *starts, *solutions)
        ctx.rule, ctx.size, ctx.groups = rule, size, groups
        return y, state.view(initial_state.shape).clone()

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        groups, saved = ctx.groups, ctx.saved_tensors
        count = len(groups)
        inputs, starts, solutions = saved[: -2 * count], saved[-2 * count : -count], saved[-count:]
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]
        repeats = [grad_y.shape[2] // t.shape[2] for t in inputs]
        grad_state, rooms = grad_final.flatten(0, 1), _rooms(2, grad_final, groups)
        for (group, tokens), start, solved in reversed(list(zip(groups, starts, solutions, strict=True))):
            parts = (to_chunks(t[:, tokens], ctx.size, n) for t, n in zip(inputs, repeats, strict=True))
            chunks = ctx.rule(*parts)
            states, grad_states = (room[: group.stop - group.start + 1] for room in rooms)
            states[0], grad_states[-1] = start, grad_state
            advance_again(chunks, states, solved)
            outs, d_written = retreat(chunks, to_chunks(grad_y[:, tokens], ctx.size), grad_states)
            grad_state = grad_states[0].clone()
            through = states[:-1].flatten(0, 1), grad_states[1:].flatten(0, 1)
            found = chunks.gradients(outs, d_written, solved, *through)
            for out, gradient, n in zip(gradients, found, repeats, strict=True):
                from_chunks(gradient, out[:, tokens], n)
        return None, None, grad_state.view(grad_final.shape), *gradients


def _rooms(number: int, state_BHPN: Tensor, groups: Sequence[tuple[slice, slice]]) -> list[Tensor]:
    """Memory for the states around the chunks of a group, (chunks + 1, B*H, P, N), made once: fresh pages are slow."""
    return [state_BHPN.new_empty(groups[0][0].stop + 1, *state_BHPN.flatten(0, 1).shape) for _ in range(number)]


def advance(chunks: _Rule, states: Tensor) -> tuple[Tensor, Tensor]:
    """What each reader reads of the states, (Z, R, Q, P), and what is solved for, (Z, Q, P).

    Fills the states around the chunks, (1 + chunks, B*H, P, N), from the first on, and what is written.
    """
    pairs, values, count = chunks.pairs, chunks.values, len(states) - 1
    solved = torch.empty_like(chunks.known)
    reads = solved.new_empty(*pairs.readers.shape[:3], solved.shape[2])
    parts = (reads, solved, values, chunks.known, chunks.solve, chunks.rate, pairs.starts, pairs.writes, pairs.total)
    for start, end, (read, u, value, known, solve, rate, reader, writer, total) in zip(
        states[:-1], states[1:], _by_chunk(count, *parts), strict=True
    ):
        torch.bmm(reader.flatten(1, 2), start.mT, out=read.flatten(1, 2))
        torch.bmm(solve, read[:, 1] + known, out=u)
        value[:, 0].copy_(u).mul_(rate)  # torch.compile refuses out= with gaps
        torch.mul(start, total, out=end).baddbmm_(value.flatten(1, 2).mT, writer.flatten(1, 2))
    return reads, solved


def advance_again(chunks: _Rule, states: Tensor, solved: Tensor) -> None:
    """Fills the states, and what is written, from what was solved for."""
    pairs, values, count = chunks.pairs, chunks.values, len(states) - 1
    values[:, 0].copy_(solved).mul_(chunks.rate)
    for start, end, (value, writer, total) in zip(
        states[:-1], states[1:], _by_chunk(count, values, pairs.writes, pairs.total), strict=True
    ):
        torch.mul(start, total, out=end).baddbmm_(value.flatten(1, 2).mT, writer.flatten(1, 2))


def retreat(chunks: _Rule, dy: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of what each reader reads, (Z, R, Q, P), and of w but for what comes through what is read.

    Fills the gradients of the states, from the last one back.
    """
    pairs, count = chunks.pairs, len(grad_states) - 1
    d_written, outs = torch.bmm(pairs.M[0][0].mT, dy), dy.new_empty(*pairs.readers.shape[:3], dy.shape[2])
    outs[:, 0] = dy
    back = (chunks.solve * chunks.rate).mT
    parts = _by_chunk(count, outs, d_written, back, pairs.starts, pairs.writes, pairs.total)
    steps = list(zip(grad_states[:-1], grad_states[1:], parts, strict=True))
    for start, end, (out, dw, back, reader, writer, total) in reversed(steps):
        dw.baddbmm_(writer[:, 0], end.mT)
        out[:, 1] = torch.bmm(back, dw)
        torch.mul(end, total, out=start).baddbmm_(out.flatten(1, 2).mT, reader.flatten(1, 2))
    return outs, d_written


def _by_chunk(count: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each chunk its parts, (Z, ...) -> (B*H, ...)."""
    return zip(*(t.unflatten(0, (count, -1)).unbind(0) for t in parts), strict=True)


class _Rule:
    """Chunks of a recurrence: what its readers read of the state (Z, R, Q, P), and its writers write (Z, W, Q, P).

    Of `pairs`, the queries are the first reader. What the second one reads, and w, which goes to the first writer:

        u = solve (known + starts_1 S_0^T)        w = rate u

    Attributes:
        pairs: Products of readers and writers.
        known: What is known of the second reader before the states, (Z, Q, P).
        solve: (Z, Q, Q).
        rate: (Z, Q, 1).
        values: What the writers write, of which w is filled in.
    """

    pairs: ScalarPairs | ChannelPairs
    known: Tensor
    solve: Tensor
    rate: Tensor
    values: Tensor

    def outputs(self, reads: Tensor) -> Tensor:
        """y, (Z, Q, P)."""
        y = reads[:, 0]
        for M, value in zip(self.pairs.M[0], self.values.unbind(1), strict=True):
            y = torch.baddbmm(y, M, value)
        return y


class DeltaRule(_Rule):
    """Chunks of S_t = S_{t-1} diag(exp(g_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and y_t = S_t q_t.

    u_t = v_t - S_{t-1} diag(exp(g_t)) k_t is what is wrong about the value of a key, and w_t = beta_t u_t is written.
    With M_ij = -k_i^T diag(decay from j to i) k_j for j < i, u = v - (d k) S_0^T + M w:

        u = (I - M diag(beta))^-1 (v - (d k) S_0^T)        w = diag(beta) u
    """

    def __init__(self, v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> None:
        self.q, self.k, self.known, self.rate = q, k, v, beta
        self.values = torch.empty_like(v)[:, None]
        pairs = ScalarPairs if g.shape[2] == 1 else ChannelPairs
        self.pairs = pairs(g, torch.stack([q, -k], 1), k[:, None], exclusive=False)
        self.pairs.M[0][0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        self.solve = _inverse(self.pairs.M[1][0] * -beta.mT)  # beta is (Z, Q, 1)

    def gradients(self, outs: Tensor, dw: Tensor, u: Tensor, starts: Tensor, grad_ends: Tensor) -> Sequence[Tensor]:
        """Of v, q, k, g and beta."""
        d_readers, d_writers, dg = self.pairs.gradients(outs, self.values, starts, grad_ends)
        (dq, dk_read), dk, (dy, dv) = d_readers.unbind(1), d_writers[:, 0], outs.unbind(1)
        own = (dy * self.values[:, 0]).sum(-1, keepdim=True)
        dq.addcmul_(own, self.k)
        dk.sub_(dk_read).addcmul_(own, self.q)
        dbeta = (dw.baddbmm_(self.pairs.M[1][0].mT, dv) * u).sum(-1, keepdim=True)
        return dv, dq, dk, dg, dbeta


class LowRank(_Rule):
    """Chunks of S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + v_t k_t^T and y_t = S_t q_t.

    w_t = S_{t-1} a_t is what is read, and written. A reader a does not see its own gate, so all decays end before
    their token, and the other reader is exp(g) q:

        w = u = (I - M_ab)^-1 (M_ak v + (d a) S_0^T)
    """

    def __init__(self, v: Tensor, q: Tensor, k: Tensor, g: Tensor, a: Tensor, b: Tensor) -> None:
        self.q, self.gate, self.values = q, g.exp(), torch.stack([v, v], 1)
        self.rate = g.new_ones(len(g), g.shape[1], 1)
        self.pairs = ChannelPairs(g, torch.stack([q * self.gate, a], 1), torch.stack([b, k], 1), exclusive=True)
        for M, writer in zip(self.pairs.M[0], (b, k), strict=True):
            M.diagonal(dim1=1, dim2=2).copy_((q * writer).sum(-1))
        self.solve, self.known = _inverse(-self.pairs.M[1][0]), torch.bmm(self.pairs.M[1][1], v)

    def gradients(self, outs: Tensor, dw: Tensor, u: Tensor, starts: Tensor, grad_ends: Tensor) -> Sequence[Tensor]:
        """Of v, q, k, g, a and b."""
        M, (dy, dr) = self.pairs.M, outs.unbind(1)
        dv = torch.bmm(M[0][1].mT, dy).baddbmm_(M[1][1].mT, dr).baddbmm_(self.pairs.writes[:, 1], grad_ends.mT)
        d_readers, d_writers, dg = self.pairs.gradients(outs, self.values, starts, grad_ends)
        dq, da = d_readers.unbind(1)
        dq.mul_(self.gate)
        dg.addcmul_(dq, self.q)
        own = (dy[:, None] * self.values).sum(-1, keepdim=True)
        dq.add_((own * self.pairs.writers).sum(1))
        db, dk = d_writers.addcmul_(own, self.q[:, None]).unbind(1)
        return dv, dq, dk, dg, da, db


def _inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of matrices (Z, Q, Q), which count below their diagonal only."""
    identity = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    return solve_triangular(lower, identity, upper=False, unitriangular=True)


class PairGradients(NamedTuple):
    """Of readers (Z, R, Q, N), writers (Z, W, Q, N), and gates."""

    readers: Tensor
    writers: Tensor
    gates: Tensor


class _Pairs:
    """R readers (Z, R, Q, N) meet earlier ones of W writers (Z, W, Q, N) in their chunk, with the decays between them.

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

    M: Sequence[Sequence[Tensor]]

    def __init__(self, g: Tensor, readers: Tensor, writers: Tensor, exclusive: bool) -> None:
        self.exclusive, self.decays = exclusive, Decays(g, exclusive)
        self.readers, self.writers = readers, writers
        self.starts = readers * self.decays.from_start[:, None]
        self.writes = writers * self.decays.to_end[:, None]
        self.total = self.decays.total[:, None]

    def _around(self, outs: Tensor, values: Tensor, starts: Tensor, grad_ends: Tensor) -> tuple[Tensor, Tensor]:
        """What `starts` and `writes` pass on to the gradients of readers and writers."""
        d_readers = torch.bmm(outs.flatten(1, 2), starts).view_as(self.readers)
        d_writers = torch.bmm(values.flatten(1, 2), grad_ends).view_as(self.writers)
        return d_readers.mul_(self.decays.from_start[:, None]), d_writers.mul_(self.decays.to_end[:, None])

    def gradients(self, outs: Tensor, values: Tensor, starts: Tensor, grad_ends: Tensor) -> PairGradients:
        """What M, `starts` and `writes` pass on; overwrites the states `starts`.

        Args:
            outs: Gradients of what each reader reads, (Z, R, Q, P).
            values: What each writer writes, (Z, W, Q, P).
            starts: States before the chunks, (Z, P, N).
            grad_ends: Gradients of the states after them.
        """
        raise NotImplementedError


class ScalarPairs(_Pairs):
    """With one gate per head: each product is a matrix product times the decays; one writer, and never `exclusive`."""

    def __init__(self, g: Tensor, readers: Tensor, writers: Tensor, exclusive: bool) -> None:
        super().__init__(g, readers, writers, exclusive)
        assert writers.shape[1] == 1
        assert not exclusive
        self.between = g.new_zeros(len(g), g.shape[1], g.shape[1])
        for b, (to_middle, from_middle) in self.decays.levels.items():
            block = below_diagonal(self.between, b)
            block.copy_((from_middle * to_middle.mT).view(block.shape))
        self.joined = self._decayed(torch.bmm(readers.flatten(1, 2), writers[:, 0].mT))
        self.M = [[M] for M in self.joined.unbind(1)]

    def _decayed(self, products: Tensor) -> Tensor:
        """(Z, R * Q, Q) to (Z, R, Q, Q)."""
        return products.unflatten(1, self.readers.shape[1:3]).mul_(self.between[:, None])

    def gradients(self, outs: Tensor, values: Tensor, starts: Tensor, grad_ends: Tensor) -> PairGradients:
        d_readers, d_writers = self._around(outs, values, starts, grad_ends)
        of_readers, of_writers = (d_readers * self.readers).sum(3).sum(1), (d_writers * self.writers)[:, 0].sum(2)
        dM = torch.bmm(outs.flatten(1, 2), values[:, 0].mT)
        inside = (dM.view_as(self.joined) * self.joined).sum(1)
        dM = self._decayed(dM).flatten(1, 2)
        d_readers.flatten(1, 2).baddbmm_(dM, self.writers[:, 0])
        d_writers[:, 0].baddbmm_(dM.mT, self.readers.flatten(1, 2))
        before = torch.ones_like(inside[0]).triu_(1)  # 1 where the writer of a row is before the token of a column
        gates = (inside.tril_(-1).flatten(0, 1) @ before).view_as(inside).tril_().sum(1)
        gates += of_readers @ (1 - before).to(gates) + of_writers @ before
        through = starts.mul_(grad_ends).flatten(1).sum(1, keepdim=True) * self.total[:, 0]
        return PairGradients(d_readers, d_writers, (gates + through)[..., None])


class ChannelPairs(_Pairs):
    """With a gate per channel: products are built by halving the chunk, as in `ChunkedGatedScan`."""

    def __init__(self, g: Tensor, readers: Tensor, writers: Tensor, exclusive: bool) -> None:
        super().__init__(g, readers, writers, exclusive)
        M = g.new_zeros(readers.shape[1], writers.shape[1], len(g), g.shape[1], g.shape[1])
        for b in self.decays.levels:
            right, left, *_ = self._level(b)
            block = _blocks(M, b)
            block.copy_(torch.bmm(_rows(right), _rows(left).mT).view(block.shape))
        self.M = [row.unbind(0) for row in M.unbind(0)]

    def _level(self, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Readers in right halves and writers in left halves of blocks of 2b, decayed to the middle; these decays."""
        to_middle, from_middle = (t.unflatten(0, (len(self.readers), -1))[:, :, None] for t in self.decays.levels[b])
        right, left = (
            torch.mul(half, decay, out=half.new_empty(half.shape))
            for half, decay in ((_half(self.readers, b, 1), from_middle), (_half(self.writers, b, 0), to_middle))
        )
        return right, left, to_middle, from_middle

    def gradients(self, outs: Tensor, values: Tensor, starts: Tensor, grad_ends: Tensor) -> PairGradients:
        d_readers, d_writers = self._around(outs, values, starts, grad_ends)
        (count, R, size, _), W = self.readers.shape, self.writers.shape[1]
        through = starts.mul_(grad_ends).sum(1) * self.total[:, 0]
        of_readers, of_writers = (d_readers * self.readers).sum(1), (d_writers * self.writers).sum(1)
        gates = GateGradient(of_readers, of_writers, through, self.exclusive)
        dM = torch.bmm(outs.flatten(1, 2), values.flatten(1, 2).mT)
        dM = dM.view(count, R, size, W, size).permute(1, 3, 0, 2, 4).contiguous()
        for b in reversed(self.decays.levels):
            right, left, to_middle, from_middle = self._level(b)
            block = _blocks(dM, b).reshape(-1, R * b, W * b)
            to_right = torch.bmm(block, _rows(left)).view_as(right)
            to_left = torch.bmm(block.mT, _rows(right)).view_as(left)
            _half(d_readers, b, 1).addcmul_(to_right, from_middle)
            _half(d_writers, b, 0).addcmul_(to_left, to_middle)
            gates.add(b, *(t.sum(2).flatten(0, 1) for t in (to_right.mul_(right), to_left.mul_(left))))
        return PairGradients(d_readers, d_writers, gates.result())


def _half(t_ZXQN: Tensor, b: int, which: int) -> Tensor:
    """The left (0) or right (1) halves of all blocks of 2b tokens, a view (Z, Q/2b, X, b, N)."""
    return t_ZXQN.unflatten(2, (-1, 2, b))[:, :, :, which].transpose(1, 2)


def _rows(half: Tensor) -> Tensor:
    """(Z, Q/2b, X, b, N) -> (Z * Q/2b, X * b, N)."""
    return half.flatten(2, 3).flatten(0, 1)


def _blocks(M: Tensor, b: int) -> Tensor:
    """Right half against left half of all blocks of 2b tokens of (R, W, Z, Q, Q), a view (Z, Q/2b, R, b, W, b)."""
    return below_diagonal(M.flatten(0, 2), b).unflatten(0, M.shape[:3]).permute(2, 3, 0, 4, 1, 5)
