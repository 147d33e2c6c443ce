"""The selective scan of Mamba-1 in Triton, with an initial and a final state, forward and backward.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    y_t = (C_t . h_t + D x_t) silu(z_t),    dt_t = softplus(raw_t)

as in scan_selective.py; softplus and gate z are optional. A program has one row and 32 channels. It reads a tile of 8
tokens at once, since a program that reads each token when it gets there waits for memory most of the time. With the
channels last in a tile, Triton gives all tokens of a channel and state to one thread, and the scan of a tile moves
nothing between threads. The forward pass keeps the state before every 128 tokens. From there the backward pass finds
the states before tiles again, in memory that stays in the cache, and takes the tiles from the last to the first. No
decay is ever divided by. Gradients of B and C are summed over 32 channels in the kernel and over programs in torch,
from 2 N / 32 numbers per token and channel: always in the same order, unlike atomic additions.

Compiled for sm_90 by Triton 3.9 with N = 16 in bfloat16: 120 registers forward, 255 backward, nothing spilled; 11 and
42 instructions per token and channel. Never run on a GPU. Importing this file raises `ImportError` without Triton.

Shapes: B batch, T time, D channels, N states. In kernels, T is a tile of tokens and D a block of channels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# since the arguments of kernels have types of Triton, and annotations mean constants

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .scan_backends import backward_once, chunked_scan

try:  # in a block of its own, so that Transformers does not ask for it where a checkpoint is loaded with its code
    import triton
    import triton.language as tl
except ImportError:
    raise

_CHUNK = 128  # tokens per state that is kept
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
_on_device_of = torch.cuda.device_of  # Triton launches on the current device, which need not be that of the tensors
_LOG2_E = tl.constexpr(1.4426950408889634)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor,
    gate: Tensor | None = None,
    softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, D) in the dtype of x, and the state after the last token in the dtype of the initial one.

    It computes in float32. Gradients come in the dtypes of their tensors.

    Args:
        x: Inputs, (B, T, D).
        dt: Step sizes, (B, T, D), before softplus if `softplus`; there, -inf leaves the state unchanged.
        A: Negative decay rates, (D, N).
        B, C: Input and output projections, (B, T, N).
        D: Skip weights, (D,).
        initial_state: (B, D, N).
        gate: z, (B, T, D).
        softplus: See above.
    """
    inputs = [x, dt, A.float(), B, C, D.float()] + ([] if gate is None else [gate])
    state = initial_state.float()
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in (state, *inputs))):
        y, final_state = _scan(int(softplus), state, *inputs)
    else:
        y, final_state, _ = _run(softplus, state, inputs, keep=False)
    return y, final_state.to(initial_state.dtype)


class _SelectiveKernel(torch.autograd.Function):
    """Arguments as of `chunked_scan`, whose chunk size is `softplus`; the gate is the seventh input."""

    @staticmethod
    def forward(ctx: Any, softplus: int, initial_state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, final_state, starts = _run(bool(softplus), initial_state, inputs, keep=True)
        ctx.save_for_backward(*inputs, starts)
        ctx.softplus = bool(softplus)
        return y, final_state

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, starts = ctx.saved_tensors
        return None, *_gradients(ctx.softplus, grad_y, grad_final, inputs, starts)


_scan = chunked_scan(_SelectiveKernel)


class ScanOfModules(torch.autograd.Function):
    """The scan and the modules that make its inputs, which the backward pass calls again instead of keeping theirs.

    `apply` takes `read`, from inputs (B, T, D) and their convolution state to x, steps before softplus, B, C and the
    convolution state after them; the gate, A, D and the state of the scan; what `read` takes; and the weights that it
    reads. It gives outputs and both states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        read: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        gate: Tensor,
        A: Tensor,
        D: Tensor,
        state: Tensor,
        x: Tensor,
        conv: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        convolved, dt, B, C, after = read(x, conv)
        y, final_state, starts = _run(True, state, [convolved, dt, A, B, C, D, gate], keep=True)
        ctx.save_for_backward(gate, A, D, starts, x, conv, *weights)
        device = x.device.type
        ctx.read, ctx.autocast = read, (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return y, final_state, after

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor, grad_after: Tensor) -> tuple[Tensor | None, ...]:
        gate, A, D, starts, x, conv, *weights = ctx.saved_tensors
        leaves = [x.detach().requires_grad_(), conv.detach().requires_grad_(), *weights]
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            made = ctx.read(*leaves[:2])
        convolved, dt, B, C, _ = (part.detach() for part in made)
        inputs = [convolved, dt, A, B, C, D, gate]
        grad_state, grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D, grad_gate = _gradients(
            True, grad_y, grad_final, inputs, starts
        )
        wanted, of_made = (
            [leaf for leaf in leaves if leaf.requires_grad],
            [grad_x, grad_dt, grad_B, grad_C, grad_after],
        )
        found = iter(torch.autograd.grad(made, wanted, of_made))  # an error if `read` has other weights now
        of_leaves = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return None, grad_gate, grad_A, grad_D, grad_state, *of_leaves


def _run(softplus: bool, initial_state: Tensor, inputs: Sequence[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Third is the state before each chunk, (B, T / 128, D, N), or none."""
    x, dt, A, B, C, D, z, strides = _prepared(inputs)
    (rows, length, channels), states = x.shape, A.shape[1]
    y, final_state = x.new_empty(x.shape), initial_state.new_empty(initial_state.shape)
    chunks = triton.cdiv(length, _CHUNK)
    starts = A.new_empty(rows, chunks if keep else 0, channels, states)
    sizes = length, channels, states, chunks
    tile = _tile(states)
    with _on_device_of(x):
        _forward[rows, triton.cdiv(channels, tile["BLOCK"])](
            *(x, dt, A, B, C, D, z, initial_state.contiguous(), y, final_state, starts),
            *(*sizes, *strides),
            SOFTPLUS=softplus,
            GATE=len(inputs) == 7,
            KEEP=keep,
            **tile,
            **_LAUNCH,
        )
    return y, final_state, starts


def _gradients(
    softplus: bool, grad_y: Tensor, grad_final: Tensor, inputs: Sequence[Tensor], starts: Tensor
) -> tuple[Tensor, ...]:
    """Of the initial state and all inputs."""
    x, dt, A, B, C, D, z, strides = _prepared(inputs)
    (rows, length, channels), states = x.shape, A.shape[1]
    grad_y = _channels_last(grad_y)
    grad_x, grad_dt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    grad_z = z.new_empty(z.shape) if len(inputs) == 7 else grad_x
    tile = _tile(states)
    blocks = triton.cdiv(channels, tile["BLOCK"])
    grad_B, grad_C = starts.new_empty(2, blocks, rows, length, states)
    grad_A, grad_D = starts.new_empty(rows, channels, states), starts.new_empty(rows, channels)
    grad_state = starts.new_empty(rows, channels, states)
    before_tiles = starts.new_empty(rows, blocks, _CHUNK // tile["TOKENS"], tile["N"], tile["BLOCK"])
    with _on_device_of(x):
        _backward[rows, blocks](
            *(x, dt, A, B, C, D, z, starts, before_tiles, grad_y, grad_final.contiguous()),
            *(grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D, grad_z, grad_state),
            *(length, channels, states, starts.shape[1], rows, *strides, *grad_y.stride()[:2]),
            SOFTPLUS=softplus,
            GATE=len(inputs) == 7,
            **tile,
            **_LAUNCH,
        )
    sums = grad_A.sum(0), grad_B.sum(0).to(B.dtype), grad_C.sum(0).to(C.dtype), grad_D.sum(0)
    return grad_state, grad_x, grad_dt, *sums, *([grad_z] if len(inputs) == 7 else [])


def _prepared(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """x, dt, A, B, C, D and the gate (x where there is none) with one number after the other in the last dimension,
    and the strides of rows and tokens of x, dt, B, C and the gate."""
    x, dt, A, B, C, D, *gate = map(_channels_last, inputs)
    z = gate[0] if gate else x
    strides = [stride for t in (x, dt, B, C, z) for stride in t.stride()[:2]]
    return x, dt, A.contiguous(), B, C, D, z, strides


def _channels_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(states: int) -> dict[str, int]:
    """So large that a thread's part of a tile stays in its registers."""
    padded = triton.next_power_of_2(states)
    tokens, block = (8, 32) if padded <= 16 else (4, 512 // padded)
    return {"N": padded, "BLOCK": block, "TOKENS": tokens, "CHUNK": _CHUNK}


@triton.jit
def _softplus(raw):
    """log(1 + e^raw); a small e^raw keeps the digits that 1 + e^raw rounds away."""
    e = tl.exp(tl.minimum(raw, 20.0))
    rounded = 1.0 + e
    kept = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    log = tl.where(rounded == 1.0, e, tl.log(rounded) * (e / kept))
    return tl.where(raw > 20.0, raw, log)


@triton.jit
def _then(decay, written, next_decay, next_written):
    """Two steps as one: what is left of the state before them, and what they write."""
    return decay * next_decay, written * next_decay + next_written


@triton.jit
def _then_with_last_left_out(decay, written, _, __, next_decay, next_written, inner_decay, inner_written):
    """`_then`, and the same without the last step."""
    return (
        decay * next_decay,
        written * next_decay + next_written,
        decay * inner_decay,
        written * inner_decay + inner_written,
    )


@triton.jit
def _read(x, dt, B, x_token, dt_token, B_token, start, A_ND, token, d, n, real_TD, real_TN, SOFTPLUS: tl.constexpr):
    """x, raw steps, steps and B of a tile, and decays and what is written, (T, N, D)."""
    x_TD = tl.load(x + start * x_token + token[:, None] * x_token + d[None, :], real_TD, 0.0).to(tl.float32)
    raw_TD = tl.load(dt + start * dt_token + token[:, None] * dt_token + d[None, :], real_TD, 0.0).to(tl.float32)
    B_TN = tl.load(B + start * B_token + token[:, None] * B_token + n[None, :], real_TN, 0.0).to(tl.float32)
    dt_TD = tl.where(real_TD, _softplus(raw_TD) if SOFTPLUS else raw_TD, 0.0)
    decay = tl.exp2(dt_TD[:, None, :] * (A_ND * _LOG2_E)[None])
    return x_TD, raw_TD, dt_TD, B_TN, decay, (dt_TD * x_TD)[:, None, :] * B_TN[:, :, None]


@triton.jit
def _after(h, decay, written, token, TOKENS: tl.constexpr):
    """The states after each token of a tile, (T, N, D), and after the tile, from the one before it."""
    written += tl.where((token == 0)[:, None, None], decay * h[None], 0.0)
    _, states = tl.associative_scan((decay, written), 0, _then)
    return states, tl.sum(tl.where((token == TOKENS - 1)[:, None, None], states, 0.0), 0)


@triton.jit
def _forward(
    x, dt, A, B, C, D, z, state, y, final, starts, length, channels, states, chunks,
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, z_row, z_token,
    SOFTPLUS: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d, n, token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, TOKENS)
    real_D, real_N = d < channels, n < states
    real_ND, of_state = real_N[:, None] & real_D[None, :], d[None, :] * states + n[:, None]
    A_ND, D_D = tl.load(A + of_state, real_ND, 0.0), tl.load(D + d, real_D, 0.0)
    h = tl.load(state + row * channels * states + of_state, real_ND, 0.0)
    x, dt, B, C, z = x + row * x_row, dt + row * dt_row, B + row * B_row, C + row * C_row, z + row * z_row
    y += row * length * channels
    for first in range(0, length, TOKENS):
        start, real_T = tl.cast(first, tl.int64), first + token < length
        real_TD, real_TN = real_T[:, None] & real_D[None, :], real_T[:, None] & real_N[None, :]
        if KEEP:  # noqa: SIM102  as the compiler sees it, one is a constant
            if first % CHUNK == 0:
                tl.store(starts + (row * chunks + first // CHUNK) * channels * states + of_state, h, real_ND)
        x_TD, _, _, _, decay, written = _read(
            x, dt, B, x_token, dt_token, B_token, start, A_ND, token, d, n, real_TD, real_TN, SOFTPLUS
        )
        after, h = _after(h, decay, written, token, TOKENS)
        C_TN = tl.load(C + start * C_token + token[:, None] * C_token + n[None, :], real_TN, 0.0).to(tl.float32)
        out = tl.sum(after * C_TN[:, :, None], 1) + D_D[None, :] * x_TD
        if GATE:
            z_TD = tl.load(z + start * z_token + token[:, None] * z_token + d[None, :], real_TD, 0.0).to(tl.float32)
            out *= z_TD / (1.0 + tl.exp(-z_TD))
        tl.store(y + start * channels + token[:, None] * channels + d[None, :], out, real_TD)
    tl.store(final + row * channels * states + of_state, h, real_ND)


@triton.jit
def _backward(
    x, dt, A, B, C, D, z, starts, before_tiles, dy, d_final, dx, d_dt, dA, dB, dC, dD, dz, d_state,
    length, channels, states, chunks, rows,
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, z_row, z_token, dy_row, dy_token,
    SOFTPLUS: tl.constexpr, GATE: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """With g_t the gradient of h_t, r_t = exp(dt_t A) g_t what of it reaches h_{t-1}, and v_t that of C_t . h_t:

    g_t = C_t v_t + r_{t+1},  dC_t = sum_d h_t v_t,  d(dt x)_t = sum_n B_t g_t,  dB_t = sum_d dt_t x_t g_t, and
    r_t h_{t-1} is the gradient of dt_t A.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, n, token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, TOKENS)
    real_D, real_N = d < channels, n < states
    real_ND, of_state = real_N[:, None] & real_D[None, :], d[None, :] * states + n[:, None]
    A_ND, D_D = tl.load(A + of_state, real_ND, 0.0), tl.load(D + d, real_D, 0.0)
    r_ND = tl.load(d_final + row * channels * states + of_state, real_ND, 0.0)
    x, dt, B, C, z = x + row * x_row, dt + row * dt_row, B + row * B_row, C + row * C_row, z + row * z_row
    dy, of_row, of_sums = dy + row * dy_row, row * length * channels, (block * rows + row) * length * states
    own = before_tiles + (row * tl.num_programs(1) + block) * (CHUNK // TOKENS * N * BLOCK)
    own += n[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    dA_ND, dD_D = tl.zeros((N, BLOCK), tl.float32), tl.zeros((BLOCK,), tl.float32)
    one, none = tl.full((TOKENS, N, BLOCK), 1.0, tl.float32), tl.zeros((TOKENS, N, BLOCK), tl.float32)
    for chunks_after in range(0, chunks):
        chunk = chunks - 1 - chunks_after
        tiles = tl.cdiv(tl.minimum(CHUNK, length - chunk * CHUNK), TOKENS)
        h = tl.load(starts + (row * chunks + chunk) * channels * states + of_state, real_ND, 0.0)
        tl.debug_barrier()  # threads may read other states than they wrote
        for tile in range(0, tiles):
            tl.store(own + tile * N * BLOCK, h)
            first = chunk * CHUNK + tile * TOKENS
            start, real_T = tl.cast(first, tl.int64), first + token < length
            real_TD, real_TN = real_T[:, None] & real_D[None, :], real_T[:, None] & real_N[None, :]
            _, _, _, _, decay, written = _read(
                x, dt, B, x_token, dt_token, B_token, start, A_ND, token, d, n, real_TD, real_TN, SOFTPLUS
            )
            _, h = _after(h, decay, written, token, TOKENS)
        tl.debug_barrier()
        for tiles_after in range(0, tiles):
            tile = tiles - 1 - tiles_after
            first = chunk * CHUNK + tile * TOKENS
            start, real_T = tl.cast(first, tl.int64), first + token < length
            real_TD, real_TN = real_T[:, None] & real_D[None, :], real_T[:, None] & real_N[None, :]
            x_TD, raw_TD, dt_TD, B_TN, decay, written = _read(
                x, dt, B, x_token, dt_token, B_token, start, A_ND, token, d, n, real_TD, real_TN, SOFTPLUS
            )
            C_TN = tl.load(C + start * C_token + token[:, None] * C_token + n[None, :], real_TN, 0.0).to(tl.float32)
            v_TD = tl.load(dy + start * dy_token + token[:, None] * dy_token + d[None, :], real_TD, 0.0)
            v_TD = v_TD.to(tl.float32)
            to = of_row + start * channels + token[:, None] * channels + d[None, :]
            to_sums = of_sums + start * states + token[:, None] * states + n[None, :]

            at_start = tl.where((token == 0)[:, None, None], tl.load(own + tile * N * BLOCK)[None], 0.0)
            _, h_TND, _, before = tl.associative_scan(
                (decay, written + decay * at_start, one, none), 0, _then_with_last_left_out
            )
            before += at_start
            if GATE:
                z_TD = tl.load(z + start * z_token + token[:, None] * z_token + d[None, :], real_TD, 0.0)
                z_TD = z_TD.to(tl.float32)
                open_TD = 1.0 / (1.0 + tl.exp(-z_TD))
                out = tl.sum(h_TND * C_TN[:, :, None], 1) + D_D[None, :] * x_TD
                tl.store(dz + to, v_TD * out * open_TD * (1.0 + z_TD * (1.0 - open_TD)), real_TD)
                v_TD *= z_TD * open_TD
            tl.store(dC + to_sums, tl.sum(h_TND * v_TD[:, None, :], 2), real_TN)

            g = C_TN[:, :, None] * v_TD[:, None, :]
            g += tl.where((token == TOKENS - 1)[:, None, None], r_ND[None], 0.0)
            _, _, _, later = tl.associative_scan(
                (decay, decay * g, one, none), 0, _then_with_last_left_out, reverse=True
            )
            g += later
            tl.store(dB + to_sums, tl.sum(g * (dt_TD * x_TD)[:, None, :], 2), real_TN)
            r = decay * g
            r_ND = tl.sum(tl.where((token == 0)[:, None, None], r, 0.0), 0)
            of_decay = r * before
            dA_ND += tl.sum(of_decay * dt_TD[:, None, :], 0)
            of_written = tl.sum(g * B_TN[:, :, None], 1)
            of_dt = tl.sum(of_decay * A_ND[None], 1) + of_written * x_TD
            if SOFTPLUS:
                of_dt /= 1.0 + tl.exp(-raw_TD)
            tl.store(d_dt + to, of_dt, real_TD)
            tl.store(dx + to, of_written * dt_TD + v_TD * D_D[None, :], real_TD)
            dD_D += tl.sum(v_TD * x_TD, 0)
    tl.store(d_state + row * channels * states + of_state, r_ND, real_ND)
    tl.store(dA + row * channels * states + of_state, dA_ND, real_ND)
    tl.store(dD + row * channels + d, dD_D, real_D)
