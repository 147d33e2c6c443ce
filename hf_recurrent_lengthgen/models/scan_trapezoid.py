"""The recurrence of Mamba-3 with one input and output per head (SISO), with any initial state and a final state.

Definition (Lahoti et al. 2026, arXiv:2603.15569: exponential-trapezoidal rule, complex states as rotations), per batch
row and head, with log decay g_t, step dt_t, share lambda_t of the current token, and R(a) h the rotation of pairs
of keys by angles a:

    h_t = exp(g_t) (h_{t-1} + (1 - lambda_t) dt_t x_{t-1} B_{t-1}^T) R(dt_t w_t) + lambda_t dt_t x_t B_t^T    (P, N)
    y_t = h_t C_t + D x_t                                                                                  (P,)

So a state is in the frame of its token: the angles before it are no part of it. The paper and mamba-ssm turn keys and
queries by all angles since the first token instead, and keep their sum, modulo 2 pi.

This is the recurrence of scan_ssd.py on other inputs. Its keys and queries are turned by the sum of the angles since
the call began; the second write of x_t, which has the factor exp(g_{t+1}), is made by token t ahead of its time, and
taken off y_t. Behind one function, `scan_trapezoid`, are the definition as a loop, the chunked form of scan_ssd.py in
plain torch, and fla's `chunk_simple_gla` on a GPU, with the limits named in fla_kernels.py. mamba-ssm's own kernel is
not used: it rounds its inputs to bfloat16.

Because of the write ahead, what is not finite in dt or lambda reaches the outputs from the token before on.

Shape suffixes as in scan_backends.py, and A angles.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .fla_kernels import fla_kernel, scan_with_fla
from .scan_backends import ScanBackend, decayed_and_written, missing_kernel, read_out, run_scan
from .scan_ssd import ChunkedSSD, ssd_piece
from .sequence_pieces import AffineMap

chunk_simple_gla = fla_kernel("fla.ops.simple_gla", "chunk_simple_gla")


def scan_trapezoid(
    dt: Tensor,
    g: Tensor,
    share: Tensor,
    w: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor,
    chunk_size: int = 64,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence from `initial_state` over T tokens.

    Args:
        dt: Step sizes, (B, T, H). Where dt and g are 0, the state does not change.
        g: Logarithms of the decays, at most 0, (B, T, H).
        share: lambda, from 0 to 1, (B, T, H).
        w: Angles per unit of step size in radians, (B, T, A); the first A pairs of neighbors among the N keys turn.
        x: Values, (B, 1 + T, H, P), those of the token before the first one in front.
        B: Keys, (B, 1 + T, H, N), likewise.
        C: Queries, (B, T, H, N).
        D: Skip weights, (H,).
        initial_state: State before the first token, in the frame of the token before, (B, H, P, N).
        chunk_size: Tokens per chunk of the torch form, about; it changes speed and memory, not the result.
        backend: "torch" (chunked form) or "kernel" (fla, whose matrix products are in the dtype of `x`).
        in_place: Whether the initial state may be overwritten with the final one, which only a call without gradients
            and with a single token does.

    Returns:
        Outputs in the dtype of `dt`, (B, T, H, P), and the state after the last token, in its frame, (B, H, P, N), in
        the dtype of `initial_state`. Gradients flow to all tensor arguments and from both results.

    Raises:
        ValueError: for an unknown backend or a chunk size below 1.
    """
    inputs = dt, g, share, w, x, B, C, D
    return run_scan(_chunked, _scan_with_kernel, _step, inputs, initial_state, chunk_size, backend, in_place)


def scan_trapezoid_reference(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time. Same arguments and results as `scan_trapezoid`."""
    state, outputs = initial_state, []
    now, late = dt * share, dt * (1 - share)
    for t in range(dt.shape[1]):
        before = state + _outer(late[:, t], x[:, t], B[:, t])
        angles = (dt[:, t, :, None] * w[:, t, None])[:, :, None]
        state = g[:, t, :, None, None].exp() * turned(before, angles.cos(), -angles.sin())
        state = state + _outer(now[:, t], x[:, t + 1], B[:, t + 1])
        outputs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t + 1])
    return torch.stack(outputs, dim=1), state


def piece_trapezoid(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, **_: object
) -> AffineMap:
    """What T tokens do to a state; arguments as of `scan_trapezoid`."""
    state = x.new_zeros(len(x), *x.shape[2:], B.shape[3])
    as_ssd = _AsSSD.of(dt, share, w, x, B, C, state)
    total, written, *_ = ssd_piece(as_ssd.x, as_ssd.steps, g, as_ssd.keys)
    kept = total * torch.eye(B.shape[3], dtype=total.dtype, device=total.device)
    return AffineMap(as_ssd.in_last_frame(kept), as_ssd.in_last_frame(written + total * as_ssd.start), is_matrix=True)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., N) with the first A pairs of neighbors turned by angles with these cosines and sines, (..., A)."""
    pairs, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
    return torch.cat([pairs, rest], -1) if rest.shape[-1] else pairs


class _AsSSD(NamedTuple):
    """The inputs of scan_ssd.py in place of those of `scan_trapezoid`; `ahead` is what a step has for the next token.

    Keys, queries and states are in the frame of the token before the first one, `cos` and `sin` (B, H, 1, A) turn from
    there to the last token.
    """

    x: Tensor
    steps: Tensor
    ahead: Tensor
    keys: Tensor
    queries: Tensor
    start: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, dt: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, state: Tensor) -> "_AsSSD":
        late = dt * (1 - share)
        ahead = pad(late[:, 1:], (0, 0, 0, 1))
        cos, sin = _rotations(dt, w)
        start = state + _outer(late[:, 0], x[:, 0], B[:, 0])
        keys, queries = turned(B[:, 1:], cos, sin), turned(C, cos, sin)
        last = cos[:, -1, :, None], sin[:, -1, :, None]
        return cls(x[:, 1:], dt * share + ahead, ahead, keys, queries, start, *last)

    def in_last_frame(self, state: Tensor) -> Tensor:
        """States (B, H, P, N), turned back to the frame of the last token."""
        return turned(state, self.cos, -self.sin)

    def without_ahead(self, y: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Outputs, from those in which tokens have read what they wrote ahead."""
        return torch.addcmul(y, (self.ahead * (B[:, 1:] * C).sum(-1))[..., None], self.x, value=-1)


def _rotations(dt: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the sums of angles up to each token, (B, T, H, A)."""
    # over thousands of turns, float32 alone would lose the digits of the angle
    exact = torch.float32 if dt.device.type == "mps" else torch.float64
    turns = (dt[..., None] * w[:, :, None]).to(exact).cumsum(1) / (2 * math.pi)
    angles = 2 * math.pi * (turns - turns.detach().floor()).to(dt.dtype)
    return angles.cos(), angles.sin()


def _outer(steps_BH: Tensor, x_BHP: Tensor, B_BHN: Tensor) -> Tensor:
    return (steps_BH[..., None] * x_BHP)[..., None] * B_BHN[..., None, :]


def _chunked(
    dt: Tensor,
    g: Tensor,
    share: Tensor,
    w: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    as_ssd = _AsSSD.of(dt, share, w, x, B, C, state)
    y, state = ChunkedSSD.apply(as_ssd.x, as_ssd.steps, g, as_ssd.keys, as_ssd.queries, D, as_ssd.start, chunk_size)
    return as_ssd.without_ahead(y, B, C), as_ssd.in_last_frame(state)


def _step(
    dt: Tensor,
    g: Tensor,
    share: Tensor,
    w: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    before = state + _outer((dt * (1 - share))[:, 0], x[:, 0], B[:, 0])
    angles = (dt[:, 0, :, None] * w)[:, :, None]
    value = ((dt * share)[:, 0, :, None] * x[:, 1])[..., None]
    before, decay = turned(before, angles.cos(), -angles.sin()), g[:, 0, :, None, None].exp()
    state = decayed_and_written(before, decay, value, B[:, 1, :, None], out)
    return torch.addcmul(read_out(state, C[:, 0]), x[:, 1], D[:, None])[:, None], state


def _scan_with_kernel(
    dt: Tensor,
    g: Tensor,
    share: Tensor,
    w: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    if chunk_simple_gla is None:
        raise missing_kernel("flash-linear-attention")
    low = x.dtype
    dt, g, share, w, x, B, C, D = (part.to(state.dtype) for part in (dt, g, share, w, x, B, C, D))
    as_ssd = _AsSSD.of(dt, share, w, x, B, C, state)
    values = as_ssd.x * as_ssd.steps[..., None]
    inputs = as_ssd.queries.to(low), as_ssd.keys.to(low), values.to(low), g
    y, state = scan_with_fla(chunk_simple_gla, inputs, as_ssd.start)
    y = torch.addcmul(y.to(state.dtype), as_ssd.x, D[:, None])
    return as_ssd.without_ahead(y, B, C), as_ssd.in_last_frame(state)
