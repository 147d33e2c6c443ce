"""The state space dual (SSD) recurrence of Mamba-2 with any initial state and a final state.

Definition (Dao & Gu 2024, arXiv:2405.21060; "Understanding and Improving Length Generalization in
Recurrent Models", arXiv:2507.02782, Eq. 1 and 4), per batch row and head, with group g of head h:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        (P, N)
    y_t = h_t C_t + D x_t                             (P,)

Three forms behind one function, `scan_ssd`:

- `ChunkedSSD`: the chunked form in plain torch. Inside a chunk of Q tokens the map is a masked
  (Q, Q) matrix per head, between chunks one state is carried. Its backward pass recomputes the chunk
  matrices, so that only inputs, outputs and one state per chunk are in memory. It takes log decays of its own,
  g_t in place of dt_t A, since other recurrences use it, too.
- `_step`: one token, for decoding, on the state as it lies in memory.
- mamba-ssm's `mamba_chunk_scan_combined` on a GPU. It carries a float32 state from call to call, but multiplies
  float32 matrices in TF32, and below float32 rounds the states between its chunks to the dtype of the inputs.

Shape suffixes as in scan_backends.py, with H = G * R.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .scan_backends import (
    Inputs,
    ScanBackend,
    backward_once,
    chunked_scan,
    decayed_and_written,
    even_blocks,
    read_out,
    run_scan,
    scan_in_blocks,
)

try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError:
    mamba_chunk_scan_combined = None

# The kernel computes addresses in 32 bits and is silently wrong or crashes beyond (state-spaces/mamba issue
# 1015), and a grid holds at most 65535 chunks: larger inputs go through it in groups of rows and in blocks of
# tokens with the state carried. Half of the range is left for what its backward pass adds.
_KERNEL_MAX_TOKENS = 32_768
_KERNEL_MAX_ELEMENTS = 2**30
_KERNEL_MAX_CHUNKS = 65_535


def scan_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor,
    chunk_size: int = 64,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the SSD recurrence from `initial_state` over T tokens.

    Args:
        x: Inputs, (B, T, H, P).
        dt: Step sizes after softplus and clamping, (B, T, H). A step of 0 leaves the state unchanged.
        A: Negative decay rates, (H,).
        B: Input projections, (B, T, G, N); head h uses group h // (H / G).
        C: Output projections, (B, T, G, N).
        D: Skip weights, (H,).
        initial_state: State before the first token, (B, H, P, N).
        chunk_size: Tokens per chunk, about; the kernel takes the next power of two, from 16 to 256.
    """
    inputs = x, dt, A, B, C, D
    return run_scan(_chunked, _scan_with_kernel, _step, inputs, initial_state, chunk_size, backend, in_place)


def _chunked(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D = inputs
    return chunked_ssd(chunk_size, state, x, dt, dt * A, B, C, D)


def _step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token; heads are (G, R)."""
    x, dt, A, B, C, D = inputs
    batch, _, groups, state_dim = B.shape
    shape = batch, groups, -1, x.shape[3], state_dim
    state = decayed_and_written(
        state.view(shape),
        torch.exp(dt * A).view(batch, groups, -1, 1, 1),
        (dt[..., None] * x).view(batch, groups, -1, x.shape[3], 1),
        B.view(batch, groups, 1, 1, state_dim),
        None if out is None else out.view(shape),
    )
    y = read_out(state.flatten(2, 3), C[:, 0])
    return torch.addcmul(y.view(x.shape), x, D[:, None]), state.flatten(1, 2)


def _scan_with_kernel(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D = inputs
    chunk_size = kernel_chunk(chunk_size)

    def scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size, D=D, initial_states=state, return_final_states=True
        )

    y, state = scan_in_blocks(scan, (x, dt, B, C), initial_state, *kernel_block(x, dt, B, chunk_size))
    return y, state.to(initial_state.dtype)


def kernel_chunk(chunk_size: int) -> int:
    """Tokens of a chunk of the kernel: blocks are powers of two, others give NaN (state-spaces/mamba issue 449)."""
    return min(256, max(16, 1 << (chunk_size - 1).bit_length()))


def kernel_block(x: Tensor, dt: Tensor, B: Tensor, chunk_size: int) -> tuple[int, int]:
    """How many rows and tokens the kernel takes in one call."""
    (_, length, heads, head_dim), (groups, state_dim) = x.shape, B.shape[2:]
    state = heads * head_dim * state_dim
    tokens = min(_KERNEL_MAX_TOKENS, chunk_size * max(1, _KERNEL_MAX_ELEMENTS // state))
    chunks = -(-min(length, tokens) // chunk_size)
    # of one row: inputs, chunk states, C_i . B_j, and per head sums over blocks of 32 tokens
    per_chunk = max(state, groups * chunk_size**2, heads * chunk_size * max(1, chunk_size // 32))
    elements = max(x.stride(0), dt.stride(0), B.stride(0), chunks * per_chunk)
    return max(1, min(_KERNEL_MAX_ELEMENTS // elements, _KERNEL_MAX_CHUNKS // chunks)), tokens


class ChunkedSSD(torch.autograd.Function):
    """Chunked SSD with a backward pass that recomputes the (Q, Q) matrices of each chunk.

    Its arguments are those of `scan_ssd` in another order, with log decays g (B, T, H) in place of A.
    With s_i the sum of g up to token i of the chunk, u = dt x, S the state at the chunk's start and
    M_ij = (C_i . B_j) exp(s_i - s_j) for j <= i:

        y_i = sum_j M_ij u_j + exp(s_i) C_i S
        S'  = exp(s_Q) S + sum_j exp(s_Q - s_j) B_j u_j

    Inside, states are (Z, N, R*P) with Z = B*G: all heads of a group share one matrix product.
    The gradient of the log decay of token t is the sum over all products whose decay contains it: M_ij dM_ij with
    j < t <= i, those of S with y_i, of u_j with S', and of S with S'. In the shorter form, sums over i >= t of
    <dy_i, y_i> - <du_i, u_i>, products that token t does not decay cancel, and leave their rounding error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunk_size: int,
        initial_state: Tensor,
        x: Tensor,
        dt: Tensor,
        g: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
    ) -> tuple[Tensor, Tensor]:
        groups = B.shape[2]
        y, from_state = torch.empty_like(x, memory_format=torch.contiguous_format), []
        blocks = even_blocks(x.shape[1], chunk_size)
        first = _to_inner(initial_state, groups)
        states = first.new_empty(len(blocks) + 1, *first.shape)
        states[0] = first
        for index, block in enumerate(blocks):
            chunk = _Chunk(x[:, block], dt[:, block], g[:, block], B[:, block], C[:, block])
            y_inside = (chunk.times_CB(chunk.L_BHQQ()) @ chunk.u_BQHP.transpose(1, 2)).transpose(1, 2)
            from_state.append(chunk.heads(chunk.C_ZQN @ states[index]).mul_(chunk.decay_in_BQH[..., None]))
            y[:, block] = torch.add(from_state[-1], y_inside).addcmul_(x[:, block], D[:, None])
            chunk.decay(states[index], out=states[index + 1]).baddbmm_(
                chunk.B_ZQN.mT, chunk.groups_of(chunk.weighted_u_BQHP())
            )
        ctx.save_for_backward(x, dt, g, B, C, D, states, *from_state)
        ctx.blocks = blocks
        return y, _from_inner(states[-1], initial_state.shape)

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, g, B, C, D, states, *from_state = ctx.saved_tensors
        grad_x, grad_B, grad_C, grad_dt, grad_g = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, B, C, dt, g)
        )
        grad_D = torch.zeros_like(D)
        grad_out = grad_out.contiguous()  # an expanded gradient, as of a sum, would make matrix products slow
        grad_state = _to_inner(grad_final, B.shape[2])  # of the state after the current chunk
        for index, block in reversed(list(enumerate(ctx.blocks))):
            chunk = _Chunk(x[:, block], dt[:, block], g[:, block], B[:, block], C[:, block])
            grad_y = grad_out[:, block]
            grad_y_BHQP = grad_y.transpose(1, 2)

            # within the chunk: M = CB * L
            L = chunk.L_BHQQ()
            grad_CB_BHQQ = (grad_y_BHQP @ chunk.u_BQHP.permute(0, 2, 3, 1)).mul_(L)
            grad_CB = chunk.sum_heads(grad_CB_BHQQ)
            grad_u_inside = (chunk.times_CB(L).mT @ grad_y_BHQP).transpose(1, 2)

            # through the states
            grad_u = chunk.heads(chunk.B_ZQN @ grad_state)
            grad_y_decayed = chunk.groups_of(grad_y * chunk.decay_in_BQH[..., None])
            weighted_u = chunk.weighted_u_BQHP()
            of_queries, of_keys = (grad_y * from_state[index]).sum(-1), (grad_u * weighted_u).sum(-1)
            grad_u.mul_(chunk.decay_out_BQH[..., None]).add_(grad_u_inside)
            through = (grad_state * states[index]).sum(1).view(*dt[:, 0].shape, -1).sum(-1)
            weighted_u = chunk.groups_of(weighted_u)
            # (N, Q): products with the large factor on the left are faster
            grad_B_ZNQ = torch.bmm(chunk.C_ZQN.mT, grad_CB).baddbmm_(grad_state, weighted_u.mT)
            grad_C_ZNQ = torch.bmm(chunk.B_ZQN.mT, grad_CB.mT).baddbmm_(states[index], grad_y_decayed.mT)
            grad_B[:, block], grad_C[:, block] = chunk.ungroup(grad_B_ZNQ.mT), chunk.ungroup(grad_C_ZNQ.mT)

            # through the decays
            grad_g[:, block] = _sums_around(
                chunk.times_CB(grad_CB_BHQQ), of_queries, of_keys, through * chunk.decay_in_BQH[:, -1]
            )
            grad_dt[:, block] = (grad_u * x[:, block]).sum(-1)
            grad_D += (grad_y * x[:, block]).sum((0, 1, 3))
            grad_x[:, block] = grad_u.mul_(dt[:, block, :, None]).addcmul_(grad_y, D[:, None])
            chunk.decay(grad_state, out=grad_state).baddbmm_(chunk.C_ZQN.mT, grad_y_decayed)
        return None, _from_inner(grad_state, grad_final.shape), grad_x, grad_dt, grad_g, grad_B, grad_C, grad_D


chunked_ssd = chunked_scan(ChunkedSSD)


def _sums_around(inside_BHQQ: Tensor, of_queries_BQH: Tensor, of_keys_BQH: Tensor, through_BH: Tensor) -> Tensor:
    """Of each token t, the sum over what comes from before t and goes to t or later, (B, Q, H).

    `inside` goes from token j to token i and is overwritten, `of_queries` from the chunk's start to i, `of_keys` from
    j to the chunk's end, `through` from the start to the end.
    """
    before = torch.ones_like(inside_BHQQ[0, 0]).triu_(1)  # 1 where j < t
    inside_BHQ = (inside_BHQQ.flatten(0, 2) @ before).view_as(inside_BHQQ).tril_().sum(2)
    of_queries_BHQ = of_queries_BQH.transpose(1, 2) @ (1 - before)
    of_keys_BHQ = of_keys_BQH.transpose(1, 2) @ before
    return (inside_BHQ + of_queries_BHQ + of_keys_BHQ + through_BH[..., None]).transpose(1, 2)


def _to_inner(state_BHPN: Tensor, groups: int) -> Tensor:
    """(B, H, P, N) -> a new (B*G, N, R*P)."""
    batch, state_dim = state_BHPN.shape[0], state_BHPN.shape[3]
    return (
        state_BHPN.reshape(batch * groups, -1, state_dim).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    )


def _from_inner(state_ZNM: Tensor, shape: torch.Size) -> Tensor:
    """(B*G, N, R*P) -> a new (B, H, P, N)."""
    return state_ZNM.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(shape)


class _Chunk:
    """What one chunk of Q tokens needs in both directions."""

    def __init__(self, x_BQHP: Tensor, dt_BQH: Tensor, g_BQH: Tensor, B_BQGN: Tensor, C_BQGN: Tensor) -> None:
        self.batch, _, self.groups, _ = B_BQGN.shape
        self.head_dim = x_BQHP.shape[3]
        self.B_ZQN, self.C_ZQN = B_BQGN.transpose(1, 2).flatten(0, 1), C_BQGN.transpose(1, 2).flatten(0, 1)
        self.CB_ZQQ = (self.C_ZQN @ self.B_ZQN.mT).tril_()
        self.u_BQHP = x_BQHP * dt_BQH[..., None]
        # s_i - s_j cancels: in float32 alone a strong decay would blur the weak ones after it in the chunk
        exact = torch.float32 if x_BQHP.device.type == "mps" else torch.float64
        s_BQH = g_BQH.to(exact).cumsum(1)
        self.s_BQH = s_BQH.to(x_BQHP.dtype)
        self.s_rest_BQH = (s_BQH - self.s_BQH).to(x_BQHP.dtype)
        self.decay_in_BQH = self.s_BQH.exp()
        self.decay_out_BQH = (s_BQH[:, -1:] - s_BQH).to(x_BQHP.dtype).exp_()

    def L_BHQQ(self) -> Tensor:
        """exp(s_i - s_j) for j <= i, else 0. Above the diagonal exp may be infinite, tril drops it."""
        # contiguous, else heads are the last dimension and matrix products are slow
        s_BHQ, rest_BHQ = (s.transpose(1, 2).contiguous() for s in (self.s_BQH, self.s_rest_BQH))
        s_BHQQ = s_BHQ[..., :, None] - s_BHQ[..., None, :]
        return s_BHQQ.add_(rest_BHQ[..., :, None]).sub_(rest_BHQ[..., None, :]).exp_().tril_()

    def times_CB(self, t_BHQQ: Tensor) -> Tensor:
        """Multiply in place by C_i . B_j of the head's group for j <= i, else by 0."""
        t_BHQQ.view(len(self.CB_ZQQ), -1, *self.CB_ZQQ.shape[1:]).mul_(self.CB_ZQQ[:, None])
        return t_BHQQ

    def sum_heads(self, t_BHQQ: Tensor) -> Tensor:
        """Sum over the heads of a group, (B, H, Q, Q) -> (Z, Q, Q)."""
        return t_BHQQ.view(self.batch * self.groups, -1, *t_BHQQ.shape[2:]).sum(1)

    def weighted_u_BQHP(self) -> Tensor:
        """exp(s_Q - s_j) u_j."""
        return self.u_BQHP * self.decay_out_BQH[..., None]

    def decay(self, state_ZNM: Tensor, out: Tensor) -> Tensor:
        """Multiply by exp(s_Q) of each head."""
        decay_ZR = self.decay_in_BQH[:, -1].reshape(len(state_ZNM), -1)
        by_head, out_by_head = (t.unflatten(2, (-1, self.head_dim)) for t in (state_ZNM, out))
        torch.mul(by_head, decay_ZR[:, None, :, None], out=out_by_head)
        return out

    def groups_of(self, t_BQHP: Tensor) -> Tensor:
        """(B, Q, H, P) -> (Z, Q, R*P), a view when there is one group."""
        return t_BQHP.unflatten(2, (self.groups, -1)).flatten(3).transpose(1, 2).flatten(0, 1)

    def ungroup(self, t_ZQM: Tensor) -> Tensor:
        """(Z, Q, M) -> (B, Q, G, M)."""
        return t_ZQM.unflatten(0, (self.batch, self.groups)).transpose(1, 2)

    def heads(self, t_ZQM: Tensor) -> Tensor:
        """(Z, Q, R*P) -> (B, Q, H, P)."""
        return self.ungroup(t_ZQM).reshape(self.batch, t_ZQM.shape[1], -1, self.head_dim)
