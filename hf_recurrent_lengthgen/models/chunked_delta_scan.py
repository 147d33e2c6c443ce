"""Chunked forms of recurrences that read their state before they write it, in plain torch.

In a chunk that starts with the state S_0, what a token reads depends on what earlier tokens wrote. Readers and writers
meet in lower triangular products M with the decays between them, and what is read is the solution of a triangular
system (the UT transform of Yang et al. 2024, arXiv:2406.06484, section 3; with decays, arXiv:2412.06464, section 3.3).
Its adjoint is the transposed system, backwards in time. Shape suffixes as in scan_backends.py, and Z = chunks * B * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from .chunk_decays import Decays, GateGradient, below_diagonal, from_chunks, to_chunks

# Chunks are taken together up to this number of entries of one input: few calls, but all within the CPU's cache.
_TOGETHER = 2**18


class ChunkedDeltaScan(torch.autograd.Function):
    """A recurrence over chunks, with a backward pass that recomputes them from every few states.

    `rule` (`DeltaRule` or `LowRank`) has the equations of a chunk, `inputs` are its arguments, (B, T, H, X) each.
    """

    @staticmethod
    def forward(
        ctx: Any, rule: type[DeltaRule | LowRank], chunk_size: int, initial_state: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, length, heads, _ = inputs[0].shape
        size = 1
        while size < min(chunk_size, length):
            size *= 2
        together = max(1, _TOGETHER // (batch * size * heads * max(initial_state.shape[2:])))
        count = len(range(0, length, size))  # a range makes the length a constant where this is compiled
        groups = [slice(start, min(start + together, count)) for start in range(0, count, together)]
        y = initial_state.new_empty(batch, length, heads, initial_state.shape[2])
        state, starts = initial_state.flatten(0, 1), []
        for group in groups:
            tokens = slice(group.start * size, group.stop * size)
            chunks = rule(*(to_chunks(t[:, tokens], size) for t in inputs))
            starts.append(state)
            u, states = advance(chunks, state, group.stop - group.start)
            state = states[-1].clone()  # the others are made again in the backward pass
            y[:, tokens] = from_chunks(chunks.outputs(u, states[:-1].flatten(0, 1)), y[:, tokens])
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
        grad_state = grad_final.flatten(0, 1)  # of the state after the current chunks
        for group, start in zip(reversed(groups), reversed(starts), strict=True):
            tokens, count = slice(group.start * ctx.size, group.stop * ctx.size), group.stop - group.start
            chunks = ctx.rule(*(to_chunks(t[:, tokens], ctx.size) for t in inputs))
            dy = to_chunks(grad_y[:, tokens], ctx.size)
            u, states = advance(chunks, start, count)

            # the gradients of the states after each chunk, and before the first
            grad_states = states.new_empty(states.shape)
            grad_states[-1] = grad_state
            grad_states[:-1].flatten(0, 1).baddbmm_(dy.mT, chunks.pairs.starts[0], beta=0)
            du, *parts = chunks.adjoint(dy)
            parts = [t.unflatten(0, (count, -1)) for t in (du, *parts, chunks.pairs.total)]
            for index in reversed(range(count)):
                known, from_end, reader, total = (t[index] for t in parts)
                end = grad_states[index + 1]
                known.baddbmm_(from_end, end.mT)  # a part of du
                grad_states[index].addcmul_(end, total).baddbmm_(known.mT, reader)
            grad_state = grad_states[0]
            found = chunks.gradients(dy, du, u, states[:-1].flatten(0, 1), grad_states[1:].flatten(0, 1))
            for out, gradient in zip(gradients, found, strict=True):
                out[:, tokens] = from_chunks(gradient, out[:, tokens])
        return None, None, grad_state.view(grad_final.shape).clone(), *gradients


def advance(chunks: DeltaRule | LowRank, state: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What is read in `count` chunks, u (Z, Q, P), and the states around them, (count + 1, B*H, P, N)."""
    states = state.new_empty(count + 1, *state.shape)
    states[0] = state
    chunks.written(states[1:].flatten(0, 1))
    u, *parts = chunks.read()
    parts = [t.unflatten(0, (count, -1)) for t in (u, *parts, chunks.pairs.total)]
    for index in range(count):
        known, from_state, writer, total = (t[index] for t in parts)
        known.baddbmm_(from_state, states[index].mT, alpha=chunks.sign)  # a part of u
        states[index + 1].addcmul_(states[index], total).baddbmm_(known.mT, writer)
    return u, states


class DeltaRule:
    """Chunks of S_t = S_{t-1} diag(exp(g_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and y_t = S_t q_t.

    u_t = v_t - S_{t-1} diag(exp(g_t)) k_t is what is wrong about the value of a key, and beta_t u_t is written. With
    K_ij = k_i^T diag(decay from j to i) k_j for j < i:

        (I + K diag(beta)) u = v - (d k) S_0^T
    """

    sign = -1
    """Of the state in the equation of u."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
        self.q, self.k, self.v, self.beta = q, k, v, beta  # beta is (Z, Q, 1)
        pairs = ScalarPairs if g.shape[2] == 1 else ChannelPairs
        self.pairs = pairs(g, [q, k], [k], exclusive=False)
        self.pairs.M[0][0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        self.inverse = _inverse(self.pairs.M[1][0] * beta.mT)

    def written(self, states: Tensor) -> None:
        """Nothing is written that is known before the states."""
        states.zero_()

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """u is the first plus `sign` times the second times S_0^T; the third is where it is written, (Z, Q, N)."""
        known, from_state = torch.bmm(self.inverse, self.v), torch.bmm(self.inverse, self.pairs.starts[1])
        return known, from_state, self.pairs.writes[0] * self.beta

    def outputs(self, u: Tensor, starts: Tensor) -> Tensor:
        """y, (Z, Q, P)."""
        return torch.bmm(self.pairs.M[0][0], u * self.beta).baddbmm_(self.pairs.starts[0], starts.mT)

    def adjoint(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of what is written is the first plus the second times that of the next state, transposed; the
        third is what it reads of the state, (Z, Q, N)."""
        inverse = _inverse(self.pairs.M[1][0] * self.beta)
        known = torch.bmm(inverse.mT, torch.bmm(self.pairs.M[0][0].mT, dy))
        return known, torch.bmm(inverse.mT, self.pairs.writes[0]), self.pairs.starts[1] * -self.beta

    def gradients(self, dy: Tensor, de: Tensor, u: Tensor, starts: Tensor, grad_ends: Tensor) -> Sequence[Tensor]:
        """Of q, k, v, g and beta, from that of what is written, `de`."""
        e, dv = u * self.beta, de * self.beta
        (dq, dk_read), (dk,), dg = self.pairs.gradients([dy, -dv], [e], starts, grad_ends)
        own = (dy * e).sum(-1, keepdim=True)
        dq.addcmul_(own, self.k)
        dk.add_(dk_read).addcmul_(own, self.q)
        return dq, dk, dv, dg, (de * u).sum(-1, keepdim=True)


class LowRank:
    """Chunks of S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + v_t k_t^T and y_t = S_t q_t.

    u_t = S_{t-1} a_t is what is read. A reader a does not see its own gate, so all decays end before their token, and
    the other reader is exp(g) q:

        (I - M_ab) u = M_ak v + (d a) S_0^T
    """

    sign = 1

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> None:
        self.q, self.k, self.v, self.b, self.gate = q, k, v, b, g.exp()
        self.pairs = ChannelPairs(g, [q * self.gate, a], [b, k], exclusive=True)
        for index, writer in enumerate((b, k)):
            self.pairs.M[0][index].diagonal(dim1=1, dim2=2).copy_((q * writer).sum(-1))
        self.inverse = _inverse(-self.pairs.M[1][0])

    def written(self, states: Tensor) -> None:
        """The values, which are known before the states."""
        states.baddbmm_(self.v.mT, self.pairs.writes[1], beta=0)

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `DeltaRule`."""
        M = self.pairs.M[1]
        known = torch.bmm(self.inverse, torch.bmm(M[1], self.v))
        return known, torch.bmm(self.inverse, self.pairs.starts[1]), self.pairs.writes[0]

    def outputs(self, u: Tensor, starts: Tensor) -> Tensor:
        """y, (Z, Q, P)."""
        M = self.pairs.M[0]
        return torch.bmm(M[0], u).baddbmm_(M[1], self.v).baddbmm_(self.pairs.starts[0], starts.mT)

    def adjoint(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DeltaRule`; what is read is what is written."""
        known = torch.bmm(self.inverse.mT, torch.bmm(self.pairs.M[0][0].mT, dy))
        return known, torch.bmm(self.inverse.mT, self.pairs.writes[0]), self.pairs.starts[1]

    def gradients(self, dy: Tensor, du: Tensor, u: Tensor, starts: Tensor, grad_ends: Tensor) -> Sequence[Tensor]:
        """Of q, k, v, g, a and b."""
        M = self.pairs.M
        dv = torch.bmm(M[0][1].mT, dy).baddbmm_(M[1][1].mT, du).baddbmm_(self.pairs.writes[1], grad_ends.mT)
        (dq, da), (db, dk), dg = self.pairs.gradients([dy, du], [u, self.v], starts, grad_ends)
        dq.mul_(self.gate)
        dg.addcmul_(dq, self.q)
        for values, writer, gradient in ((u, self.b, db), (self.v, self.k, dk)):
            own = (dy * values).sum(-1, keepdim=True)
            dq.addcmul_(own, writer)
            gradient.addcmul_(own, self.q)
        return dq, dk, dv, dg, da, db


def _inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of matrices (Z, Q, Q), which count below their diagonal only."""
    identity = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    return solve_triangular(lower, identity, upper=False, unitriangular=True)


class PairGradients(NamedTuple):
    """Of readers, writers and gates, (Z, Q, N) each; gates as they were given."""

    readers: Sequence[Tensor]
    writers: Sequence[Tensor]
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

    M: Sequence[Sequence[Tensor]]

    def __init__(self, g: Tensor, readers: Sequence[Tensor], writers: Sequence[Tensor], exclusive: bool) -> None:
        self.exclusive, self.decays = exclusive, Decays(g, exclusive)
        self.readers, self.writers = readers, writers
        self.starts = [t * self.decays.from_start for t in readers]
        self.writes = [t * self.decays.to_end for t in writers]
        self.total = self.decays.total[:, None]

    def gradients(
        self, outs: Sequence[Tensor], values: Sequence[Tensor], starts: Tensor, grad_ends: Tensor
    ) -> PairGradients:
        """What M, `starts` and `writes` pass on.

        Args:
            outs: Gradients of what each reader reads, (Z, Q, P).
            values: What each writer writes, (Z, Q, P).
            starts: States before the chunks, (Z, P, N).
            grad_ends: Gradients of the states after them.
        """
        d_readers = [torch.bmm(out, starts).mul_(self.decays.from_start) for out in outs]
        d_writers = [torch.bmm(value, grad_ends).mul_(self.decays.to_end) for value in values]
        through = (grad_ends * starts).sum(1)
        gates = self._inside(outs, values, d_readers, d_writers, through)
        return PairGradients(d_readers, d_writers, gates)

    def _inside(
        self,
        outs: Sequence[Tensor],
        values: Sequence[Tensor],
        d_readers: Sequence[Tensor],
        d_writers: Sequence[Tensor],
        through: Tensor,
    ) -> Tensor:
        """Add what comes from within the chunk to the gradients of readers and writers; the gradient of the gates."""
        raise NotImplementedError


class ScalarPairs(_Pairs):
    """With one gate per head: each product is a matrix product times the decays; never `exclusive`."""

    def __init__(self, g: Tensor, readers: Sequence[Tensor], writers: Sequence[Tensor], exclusive: bool) -> None:
        super().__init__(g, readers, writers, exclusive)
        assert not exclusive
        self.between = g.new_zeros(len(g), g.shape[1], g.shape[1])
        for b, (to_middle, from_middle) in self.decays.levels.items():
            block = below_diagonal(self.between, b)
            block.copy_((from_middle * to_middle.mT).view(block.shape))
        self.M = [[torch.bmm(r, w.mT).mul_(self.between) for w in writers] for r in readers]

    def _inside(
        self,
        outs: Sequence[Tensor],
        values: Sequence[Tensor],
        d_readers: Sequence[Tensor],
        d_writers: Sequence[Tensor],
        through: Tensor,
    ) -> Tensor:
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
        return (gates + through.sum(1, keepdim=True) * self.total[:, 0])[..., None]


class ChannelPairs(_Pairs):
    """With a gate per channel: products are built by halving the chunk, as in `ChunkedGatedScan`."""

    def __init__(self, g: Tensor, readers: Sequence[Tensor], writers: Sequence[Tensor], exclusive: bool) -> None:
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

    def _inside(
        self,
        outs: Sequence[Tensor],
        values: Sequence[Tensor],
        d_readers: Sequence[Tensor],
        d_writers: Sequence[Tensor],
        through: Tensor,
    ) -> Tensor:
        (count, size, R, _), W = self.joined[0].shape, len(self.writers)
        of_readers, of_writers = (
            torch.stack([d * t for d, t in zip(d, of, strict=True)]).sum(0)
            for d, of in ((d_readers, self.readers), (d_writers, self.writers))
        )
        gates = GateGradient(of_readers, of_writers, through * self.total[:, 0], self.exclusive)
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
        return gates.result()


def _half(t_ZQXN: Tensor, b: int, which: int) -> Tensor:
    """The left (0) or right (1) halves of all blocks of 2b tokens, a view (Z * Q/2b, b, X, N)."""
    return t_ZQXN.view(-1, 2, b, *t_ZQXN.shape[2:])[:, which]
