"""Chunked linear attention with a decay per channel in plain torch, which the scans of GLA and RWKV-6 share.

Section 4 of Yang et al. 2023 (arXiv:2312.06635). Shape suffixes as in scan_backends.py, and Z = chunks * B * H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .scan_backends import backward_once, chunked_scan
from .scan_decays import Decays, GateGradient, below_diagonal, chunk_groups, from_chunks, halves, to_chunks


class ChunkedGatedScan(torch.autograd.Function):
    """Chunked linear attention with a decay per channel, and a backward pass that recomputes each chunk.

    With d_i and e_j the decays from the chunk's start to query i and from key j to the chunk's end, S the state at
    the start:

        y_i = sum_{j <= i} A_ij v_j + S (d_i q_i)
        S'  = S diag(d_Q) + sum_j v_j (e_j k_j)^T

    A_ij = q_i^T diag(decay from j to i) k_j is built by halving the chunk. Between the two halves of a block the decay
    is that from key to midpoint times that from midpoint to query, hence one matrix product, and both are
    exponentials of sums of gates: never positive, and without cancellation whatever the gates. The diagonal is
    q_i^T k_i without `bonus`: d_i includes the gate of token i, as in GLA. With a `bonus` u it is
    q_i^T diag(u) k_i and d_i ends before token i, as in RWKV-6.

    The gradient of a gate is the sum over all products whose decay contains it. Over the same halves these are sums
    over what lies right and left of it, again without cancellation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunk_size: int,
        initial_state: Tensor,
        v: Tensor,
        q: Tensor,
        k: Tensor,
        g: Tensor,
        bonus: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        (batch, length, heads, state_dim), head_dim = q.shape, v.shape[3]
        size, groups = chunk_groups(length, initial_state, chunk_size)
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        states = initial_state.new_empty(-(-length // size) + 1, batch * heads, head_dim, state_dim)
        states[0] = initial_state.flatten(0, 1)
        for group, tokens in groups:
            q_ZQN, k_ZQN, v_ZQP, g_ZQN = (to_chunks(t[:, tokens], size) for t in (q, k, v, g))
            decays = Decays(g_ZQN, exclusive=bonus is not None)
            ends = states[group.start + 1 : group.stop + 1]
            ends.flatten(0, 1).baddbmm_(v_ZQP.mT, k_ZQN * decays.to_end, beta=0)
            total = decays.total.view(len(ends), -1, 1, state_dim)
            for index in range(len(ends)):
                ends[index].addcmul_(states[group.start + index], total[index])
            A = _attention(q_ZQN, k_ZQN, decays, _per_chunk(bonus, batch))
            starts = states[group].flatten(0, 1)
            from_chunks(torch.bmm(A, v_ZQP).baddbmm_(q_ZQN * decays.from_start, starts.mT), y[:, tokens])
        ctx.save_for_backward(q, k, v, g, bonus, states)
        ctx.size, ctx.groups = size, groups
        return y, states[-1].view(initial_state.shape).clone()

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, bonus, states = ctx.saved_tensors
        grad_q, grad_k, grad_v, grad_g = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, g)
        )
        grad_bonus = None if bonus is None else torch.zeros_like(bonus)
        exclusive, u = bonus is not None, _per_chunk(bonus, q.shape[0])
        grad_state = grad_final.flatten(0, 1)  # of the state after the current chunks
        for group, tokens in reversed(ctx.groups):
            inputs = (t[:, tokens] for t in (q, k, v, g, grad_y))
            q_ZQN, k_ZQN, v_ZQP, g_ZQN, dy_ZQP = (to_chunks(t, ctx.size) for t in inputs)
            decays = Decays(g_ZQN, exclusive)
            starts = states[group]

            # the gradients of the states after each chunk, and before the first
            grad_states = starts.new_empty(len(starts) + 1, *starts.shape[1:])
            grad_states[-1] = grad_state
            grad_states[:-1].flatten(0, 1).baddbmm_(dy_ZQP.mT, q_ZQN * decays.from_start, beta=0)
            total = decays.total.view(len(starts), -1, 1, q.shape[3])
            for index in reversed(range(len(starts))):
                grad_states[index].addcmul_(grad_states[index + 1], total[index])
            grad_state, grad_ends = grad_states[0], grad_states[1:]

            # through the states
            dq = torch.bmm(dy_ZQP, starts.flatten(0, 1)).mul_(decays.from_start)
            dk = torch.bmm(v_ZQP, grad_ends.flatten(0, 1)).mul_(decays.to_end)
            through = (grad_ends * starts).sum(2).view(len(dq), -1).mul_(decays.total)
            gates = GateGradient(dq * q_ZQN, dk * k_ZQN, through, exclusive)

            # within the chunk
            A = _attention(q_ZQN, k_ZQN, decays, u)
            dv = torch.bmm(A.mT, dy_ZQP).baddbmm_(k_ZQN * decays.to_end, grad_ends.flatten(0, 1).mT)
            dA = torch.bmm(dy_ZQP, v_ZQP.mT)
            for b, (to_middle, from_middle) in reversed(decays.levels.items()):
                (_, q_right), (k_left, _) = halves(q_ZQN, b), halves(k_ZQN, b)
                q_right, k_left = q_right * from_middle, k_left * to_middle
                dA_block = below_diagonal(dA, b).reshape(-1, b, b)
                dq_right, dk_left = torch.bmm(dA_block, k_left), torch.bmm(dA_block.mT, q_right)
                halves(dq, b)[1].addcmul_(dq_right, from_middle)
                halves(dk, b)[0].addcmul_(dk_left, to_middle)
                gates.add(b, q_right.mul_(dq_right), k_left.mul_(dk_left))
            diagonal = dA.diagonal(dim1=1, dim2=2)[..., None]
            if grad_bonus is not None:
                grad_bonus += (diagonal * q_ZQN).mul_(k_ZQN).sum(1).view(-1, *grad_bonus.shape).sum(0)
            dq.addcmul_(diagonal, _times_bonus(k_ZQN, u))
            dk.addcmul_(diagonal, _times_bonus(q_ZQN, u))

            for out, chunks in ((grad_q, dq), (grad_k, dk), (grad_v, dv), (grad_g, gates.result())):
                from_chunks(chunks, out[:, tokens])
        gradients = grad_v, grad_q, grad_k, grad_g, *([] if grad_bonus is None else [grad_bonus])
        return None, grad_state.view(grad_final.shape).clone(), *gradients


chunked_gated_scan = chunked_scan(ChunkedGatedScan)


def _per_chunk(bonus_HN: Tensor | None, batch: int) -> Tensor | None:
    """The bonus of each B*H, (H, N) -> (B*H, 1, N)."""
    return None if bonus_HN is None else bonus_HN.repeat(batch, 1)[:, None]


def _times_bonus(t_ZQN: Tensor, bonus: Tensor | None) -> Tensor:
    return t_ZQN if bonus is None else (t_ZQN.unflatten(0, (-1, len(bonus))) * bonus).flatten(0, 1)


def _attention(q_ZQN: Tensor, k_ZQN: Tensor, decays: Decays, bonus: Tensor | None) -> Tensor:
    """A_ij, (Z, Q, Q)."""
    size = q_ZQN.shape[1]
    A = q_ZQN.new_zeros(len(q_ZQN), size, size)
    for b, (to_middle, from_middle) in decays.levels.items():
        (_, q_right), (k_left, _) = halves(q_ZQN, b), halves(k_ZQN, b)
        block = below_diagonal(A, b)
        block.copy_(torch.bmm(q_right * from_middle, (k_left * to_middle).mT).view(block.shape))
    A.diagonal(dim1=1, dim2=2).copy_((q_ZQN * _times_bonus(k_ZQN, bonus)).sum(-1))
    return A
