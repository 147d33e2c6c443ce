"""The recurrence of Mamba-3 with one input and output per head (SISO), with any initial state and a final state.

Definition (Lahoti et al. 2026, arXiv:2603.15569: exponential-trapezoidal rule, complex states as rotations), per batch
row and head, with log decay g_t, step dt_t, share lambda_t of the current token, and R(a) h the rotation of pairs
of keys by angles a:

    h_t = exp(g_t) (h_{t-1} + (1 - lambda_t) dt_t x_{t-1} B_{t-1}^T) R(dt_t w_t) + lambda_t dt_t x_t B_t^T    (P, N)
    y_t = h_t C_t + D x_t                                                                                  (P,)

So a state is in the frame of its token: the angles before it are no part of it. The paper and mamba-ssm turn keys and
queries by all angles since the first token instead, and keep their sum, modulo 2 pi.

This is the recurrence of scan_ssd.py on other inputs. Its keys and queries are turned by the sum of the angles since
the call began. The bracket above, of token t, holds all of what tokens before t write. So both writes of a token are
one, and token t reads the state with that of the token before:

    H_{t-1} = exp(g_{t-1}) H_{t-2} + (lambda_{t-1} dt_{t-1} + (1 - lambda_t) dt_t) x_{t-1} k_{t-1}^T
    y_t = exp(g_t) H_{t-1} q_t + (lambda_t dt_t k_t . q_t + D) x_t

Behind one function, `scan_trapezoid`, are the chunked form of scan_ssd.py in plain torch,
and fla's `chunk_simple_gla` on a GPU, with the limits named in scan_fla_kernels.py. mamba-ssm's own kernel is not
used: it rounds its inputs to bfloat16.

Shape suffixes as in scan_backends.py, and A angles.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .scan_backends import Inputs, ScanBackend, decayed_and_written, read_out, run_scan
from .scan_fla_kernels import fla_kernel, refuses_gates_of_heads, scan_with_fla
from .scan_ssd import chunked_ssd

chunk_gla = fla_kernel("fla.ops.gla", "chunk_gla")
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
        chunk_size: Tokens per chunk of the torch form, about.

    Returns:
        Outputs in the dtype of `dt`, (B, T, H, P), and the state after the last token, in its frame.
    """
    inputs = dt, g, share, w, x, B, C, D
    return run_scan(_chunked, _scan_with_kernel, _step, inputs, initial_state, chunk_size, backend, in_place)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., N) with the first A pairs of neighbors turned by angles with these cosines and sines, (..., A)."""
    pairs, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
    return torch.cat([pairs, rest], -1) if rest.shape[-1] else pairs


class AsSSD(NamedTuple):
    """The inputs of scan_ssd.py in place of those of `scan_trapezoid`, and what goes from its results to ours.

    x, steps, g and keys are those of the tokens before each one, in the frame of the token before the first.
    """

    x: Tensor
    steps: Tensor
    g: Tensor
    keys: Tensor
    queries: Tensor
    decay: Tensor  # exp(g_t), (B, T, H)
    skip: Tensor  # what a token reads of itself, (B, T, H, P)
    written: Tensor  # the first write of the last token, (B, H, P, N)
    cos: Tensor  # from the frame of the token before the first to that of the last, (B, H, 1, A)
    sin: Tensor

    @classmethod
    def of(
        cls, dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor
    ) -> "AsSSD":
        now, late = dt * share, dt * (1 - share)
        cos, sin = _rotations(dt, w)
        keys = turned(B[:, :-1], _of_token_before(cos, 1.0), _of_token_before(sin))
        skip = (now * (B[:, 1:] * C).sum(-1) + D)[..., None] * x[:, 1:]
        return cls(
            x=x[:, :-1],
            steps=_of_token_before(now) + late,
            g=_of_token_before(g),
            keys=keys,
            queries=turned(C, cos, sin),
            decay=g.exp(),
            skip=skip,
            written=_outer(now[:, -1], x[:, -1], B[:, -1]),
            cos=cos[:, -1, :, None],
            sin=sin[:, -1, :, None],
        )

    def outputs(self, y: Tensor) -> Tensor:
        return torch.addcmul(self.skip, self.decay[..., None], y)

    def decayed(self, state: Tensor) -> Tensor:
        """What the last token leaves of a state (B, H, ..., N), in its frame."""
        return self.decay[:, -1, :, None, None] * turned(state, self.cos, -self.sin)

    def after(self, state: Tensor) -> Tensor:
        """The state after the last token."""
        return self.decayed(state) + self.written


def _of_token_before(x: Tensor, first: float = 0.0) -> Tensor:
    """x (B, T, ...) one token later, with `first` for the token before the first."""
    return pad(x[:, :-1], (0, 0) * (x.ndim - 2) + (1, 0), value=first)


def _rotations(dt: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the sums of angles up to each token, (B, T, H, A)."""
    # over thousands of turns, float32 alone would lose the digits of the angle
    exact = torch.float32 if dt.device.type == "mps" else torch.float64
    turns = (dt[..., None] * w[:, :, None]).to(exact).cumsum(1) / (2 * math.pi)
    angles = 2 * math.pi * (turns - turns.detach().floor()).to(dt.dtype)
    return angles.cos(), angles.sin()


def _outer(steps_BH: Tensor, x_BHP: Tensor, B_BHN: Tensor) -> Tensor:
    return (steps_BH[..., None] * x_BHP)[..., None] * B_BHN[..., None, :]


def _chunked(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    as_ssd, nothing = AsSSD.of(*inputs), torch.zeros_like(inputs[-1])
    y, state = chunked_ssd(chunk_size, state, as_ssd.x, as_ssd.steps, as_ssd.g, as_ssd.keys, as_ssd.queries, nothing)
    return as_ssd.outputs(y), as_ssd.after(state)


def _step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    dt, g, share, w, x, B, C, D = inputs
    before = state + _outer((dt * (1 - share))[:, 0], x[:, 0], B[:, 0])
    angles = (dt[:, 0, :, None] * w)[:, :, None]
    value = ((dt * share)[:, 0, :, None] * x[:, 1])[..., None]
    before, decay = turned(before, angles.cos(), -angles.sin()), g[:, 0, :, None, None].exp()
    state = decayed_and_written(before, decay, value, B[:, 1, :, None], out)
    return torch.addcmul(read_out(state, C[:, 0]), x[:, 1], D[:, None])[:, None], state


def _scan_with_kernel(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    low = inputs[4].dtype  # of x
    as_ssd = AsSSD.of(*(part.to(state.dtype) for part in inputs))
    values = as_ssd.x * as_ssd.steps[..., None]
    kernel, g = chunk_simple_gla, as_ssd.g
    if refuses_gates_of_heads(g.device):
        kernel, g = chunk_gla, g[..., None].expand_as(as_ssd.keys)
    inputs = as_ssd.queries.to(low), as_ssd.keys.to(low), values.to(low), g
    y, state = scan_with_fla(kernel, inputs, state)
    return as_ssd.outputs(y.to(state.dtype)), as_ssd.after(state)
