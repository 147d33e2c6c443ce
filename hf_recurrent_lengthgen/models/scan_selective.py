"""The selective state space recurrence of Mamba-1 with any initial state and a final state.

Definition (Gu & Dao 2023, arXiv:2312.00752, Eq. 2a, with the discretization of Algorithm 2 and section 3.6: A by
zero-order hold, B by Euler), for each batch row, channel d and state n:

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t      (D, N)
    y_t = sum_n C_t h_t + D x_t                   (D,)

Three forms behind one function, `scan_selective`:

- `_loop`: a loop over time, one fused operation per token on slabs that stay in the cache of a CPU. No decay is ever
  divided by or summed up, so any decay, zero and complete erasure included, is as exact as in the definition. Its
  backward pass computes the slabs again from one state per chunk: no tensor of B*T*D*N elements exists.
- `_step`: one token, for decoding.
- `selective_scan` on a GPU, a kernel of this package in Triton (scan_selective_kernel.py).

Shape suffixes as in scan_backends.py. Slabs are (Q, B, N, D): the channels come last, so that one instruction serves
many of them whatever N is.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .scan_backends import Inputs, ScanBackend, backward_once, chunked_scan, decayed_and_written, read_out, run_scan

try:
    from .scan_selective_kernel import ScanOfModules, selective_scan
except ImportError:  # no Triton, which CUDA builds of torch bring along
    ScanOfModules = selective_scan = None  # type: ignore[assignment,misc]

# On a CPU, exp takes three times longer than exp2, and ten times where it underflows.
_LOG2_E = math.log2(math.e)
_BLOCK_ELEMENTS = 2**16  # of a state: 256 KiB in float32


def scan_selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor,
    chunk_size: int = 16,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the selective recurrence from `initial_state` over T tokens.

    Args:
        x: Inputs, (B, T, D).
        dt: Step sizes after softplus, (B, T, D). A step of 0 leaves the state unchanged.
        A: Negative decay rates, (D, N).
        B: Input projections, (B, T, N).
        C: Output projections, (B, T, N).
        D: Skip weights, (D,).
        initial_state: State before the first token, (B, D, N).
        chunk_size: Tokens per state that the torch form keeps for its backward pass.
    """
    inputs = x, dt, A, B, C, D
    return run_scan(_scan_with_torch, _scan_with_kernel, _step, inputs, initial_state, chunk_size, backend, in_place)


def without_padding(raw: Tensor, real: Tensor | None) -> Tensor:
    """Steps before softplus, (B, T, D), that leave the state unchanged where `real` (B, T) is not."""
    return raw if real is None else raw.masked_fill(~real[..., None], -math.inf)


def _step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token; .mT, since the other forms leave states with the channels last in memory."""
    x, dt, A, B, C, D = inputs
    x_BD, dt_BD = x[:, 0], dt[:, 0]
    state = decayed_and_written(
        state.mT,
        (dt_BD[:, None] * _LOG2_E * A.mT).exp2_(),
        (dt_BD * x_BD)[:, None],
        B[:, 0, :, None],
        None if out is None else out.mT,
    )
    return torch.addcmul(read_out(state.mT, C[:, 0]), x_BD, D)[:, None], state.mT


def _scan_with_torch(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D = inputs
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, dt, A, B, C, initial_state))
    # .mT: a state from this scan continues without a copy
    if keep or torch.compiler.is_compiling():
        y, final_state = _scan(chunk_size, initial_state.mT, x, dt, A.mT, B, C)
    else:
        y, final_state, _ = _loop(x, dt, A.mT, B, C, initial_state.mT, chunk_size, False)
    return y.addcmul_(x, D), final_state.mT


def _loop(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor, chunk_size: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence without D; A (N, D), states (B, N, D). Third is the state before each chunk, or none."""
    y, final_state = x.new_empty(x.shape), x.new_empty(initial_state.shape)
    starts = x.new_empty(-(-x.shape[1] // chunk_size) if keep else 0, *initial_state.shape)
    for rows, channels in _blocks(initial_state):
        log2_A, state = _log2(A[:, channels]), initial_state[rows, :, channels]
        slabs = _slabs(2, state, min(chunk_size, x.shape[1]))
        for index, start in enumerate(range(0, x.shape[1], chunk_size)):
            block = rows, slice(start, start + chunk_size)
            if keep:
                starts[index, rows, :, channels] = state
            u_QBD = (dt[block][..., channels] * x[block][..., channels]).transpose(0, 1)
            dt_QBD, B_QBN = dt[block][..., channels].transpose(0, 1), B[block].transpose(0, 1)
            _, states = _states(dt_QBD, log2_A, u_QBD, B_QBN, state, slabs)
            y[block][..., channels] = (C[block].transpose(0, 1)[:, :, None] @ states)[:, :, 0].transpose(0, 1)
            state = states[-1].clone()
        final_state[rows, :, channels] = state
    return y, final_state, starts


class _SelectiveScan(torch.autograd.Function):
    """`_loop` with a backward pass that makes the slabs again; arguments as of `chunked_scan`."""

    @staticmethod
    def forward(
        ctx: Any, chunk_size: int, initial_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, final_state, starts = _loop(x, dt, A, B, C, initial_state, chunk_size, True)
        ctx.save_for_backward(x, dt, A, B, C, starts)
        ctx.chunk_size = chunk_size
        return y, final_state

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_gradients(grad_y, grad_final, ctx.saved_tensors, ctx.chunk_size)


_scan = chunked_scan(_SelectiveScan)


def _gradients(grad_y: Tensor, grad_final: Tensor, saved: Sequence[Tensor], chunk_size: int) -> tuple[Tensor, ...]:
    """Gradients of the initial state, x, dt, A, B and C.

    With g_t the gradient of h_t, which is C_t dy_t + exp(dt_{t+1} A) g_{t+1}, and w_t = g_t exp(dt_t A) h_{t-1} that
    of dt_t A: dC_t = sum_d h_t dy_t, d(dt x)_t = sum_n B_t g_t, dB_t = sum_d dt_t x_t g_t, dA = sum_t dt_t w_t.
    """
    x, dt, A, B, C, starts = saved
    grad_initial, grad_x, grad_dt = (t.new_empty(t.shape) for t in (grad_final, x, dt))
    grad_A, grad_B, grad_C = (t.new_zeros(t.shape) for t in (A, B, C))
    for rows, channels in _blocks(grad_final):
        A_ND, grad_state = A[:, channels], grad_final[rows, :, channels]
        log2_A = _log2(A_ND)
        slabs = _slabs(3, grad_state, min(chunk_size, x.shape[1]))
        for index, start in reversed(list(enumerate(range(0, x.shape[1], chunk_size)))):
            block = rows, slice(start, start + chunk_size)
            x_QBD, dt_QBD, grad_y_QBD = (t[block][..., channels].transpose(0, 1) for t in (x, dt, grad_y))
            B_QBN, C_QBN = B[block].transpose(0, 1), C[block].transpose(0, 1)
            u_QBD, first = dt_QBD * x_QBD, starts[index, rows, :, channels]
            decays, states = _states(dt_QBD, log2_A, u_QBD, B_QBN, first, slabs)

            g = torch.mul(C_QBN[..., None], grad_y_QBD[:, :, None], out=slabs[2, : len(u_QBD)])
            g[-1].add_(grad_state)
            for now, decay_after, after in reversed(list(zip(g[:-1], decays[1:], g[1:], strict=True))):
                now.addcmul_(decay_after, after)

            grad_C[block] += (states @ grad_y_QBD[..., None])[..., 0].transpose(0, 1)
            grad_B[block] += (g @ u_QBD[..., None])[..., 0].transpose(0, 1)
            grad_u = (B_QBN[:, :, None] @ g)[:, :, 0]
            w = g.mul_(decays)
            grad_state = w[0].clone()
            w[1:].mul_(states[:-1])
            w[0].mul_(first)
            grad_A[:, channels] += torch.mul(w, dt_QBD[:, :, None], out=decays).sum((0, 1))
            grad_dt[block][..., channels] = (w.mul_(A_ND).sum(2).addcmul_(grad_u, x_QBD)).transpose(0, 1)
            grad_x[block][..., channels] = (grad_u * dt_QBD).transpose(0, 1)
        grad_initial[rows, :, channels] = grad_state
    return grad_initial, grad_x, grad_dt, grad_A, grad_B, grad_C


def _blocks(state_BND: Tensor) -> list[tuple[slice, slice]]:
    """Rows and channels that a CPU's cache holds at once, which are independent; all of them on other devices."""
    batch, state_dim, channels = state_BND.shape
    if state_BND.device.type != "cpu":
        return [(slice(batch), slice(channels))]
    columns = min(channels, max(1, _BLOCK_ELEMENTS // state_dim))
    rows = max(1, _BLOCK_ELEMENTS // (state_dim * columns))
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, batch, rows)
        for column in range(0, channels, columns)
    ]


def _log2(A_ND: Tensor) -> Tensor:
    """Rates in units of log 2, with the channels last in memory."""
    return (A_ND * _LOG2_E).contiguous()


def _slabs(count: int, state_BND: Tensor, tokens: int) -> Tensor:
    """Memory that all chunks share, since fresh memory costs more than what is computed in it."""
    return state_BND.new_empty(count, tokens, *state_BND.shape)


def _states(
    dt_QBD: Tensor, log2_A_ND: Tensor, u_QBD: Tensor, B_QBN: Tensor, state_BND: Tensor, slabs: Tensor
) -> tuple[Tensor, Tensor]:
    """Decays exp(dt_t A) and states h_t of a chunk, (Q, B, N, D) each, with u = dt x; written into the slabs."""
    decays, states = slabs[:2, : len(dt_QBD)]
    torch.mul(dt_QBD[:, :, None], log2_A_ND, out=decays).exp2_()
    torch.mul(B_QBN[..., None], u_QBD[:, :, None], out=states)
    for decay, now in zip(decays.unbind(0), states.unbind(0), strict=True):
        state_BND = now.addcmul_(decay, state_BND)
    return decays, states


def _scan_with_kernel(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D = inputs
    return selective_scan(x, dt, A, B, C, D, initial_state)
