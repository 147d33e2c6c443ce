"""Short causal depthwise convolution with SiLU that starts from any state and returns the next one.

    a_t = bias + sum_k weight_k x_{t - (K-1) + k},  y_t = silu(a_t)

The inputs before the first token are the convolution state: the last K-1 inputs, oldest first.

Shape suffixes: B batch, T time, C channels, K taps.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from .scan_backends import ScanBackend

try:
    from causal_conv1d import causal_conv1d_fn
except ImportError:
    causal_conv1d_fn = None

_KERNEL_MAX_ELEMENTS = 2**31


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor,
    lengths: Tensor | None = None,
    backend: ScanBackend = "torch",
) -> tuple[Tensor, Tensor]:
    """Convolve and apply SiLU.

    Args:
        x: Inputs, (B, T, C).
        weight: Taps, (C, K); the last one meets the current token.
        bias: (C,) or None.
        initial_state: The K-1 inputs before the first token, (B, C, K-1).
        lengths: Number of real tokens in each row, (B,); None if all T are real. Inputs past the length
            do not enter the returned state.
        backend: "torch" or "kernel" (causal-conv1d).

    Returns:
        Outputs (B, T, C) in the dtype of `x`, and the state after the last real token in the dtype of
        `initial_state`, (B, C, K-1).
    """
    state_columns = initial_state.shape[2]
    if lengths is None and x.shape[1] >= state_columns:
        final_state = x[:, x.shape[1] - state_columns :].mT
    else:
        columns = torch.cat([initial_state.mT, x.to(initial_state.dtype)], dim=1)
        ends = lengths if lengths is not None else torch.full((x.shape[0],), x.shape[1], device=x.device)
        index = ends[:, None] + torch.arange(state_columns, device=x.device)
        final_state = columns.gather(1, index[..., None].expand(-1, -1, x.shape[2])).mT
    # a copy: a view would keep the whole input alive as long as the state
    final_state = final_state.to(initial_state.dtype, copy=True)

    if backend == "kernel":
        y = _convolve_with_kernel(x, weight, bias, initial_state)
    else:
        dtype = initial_state.dtype
        bias = x.new_zeros(x.shape[2]) if bias is None else bias
        y = _CausalConvSiLU.apply(x, weight.to(dtype), bias.to(dtype), initial_state)
    return y, final_state


def _convolve_with_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor) -> Tensor:
    """Outputs of causal-conv1d, (B, T, C). It takes 2 to 4 taps, C a multiple of 8 and no float64."""
    batch, length, _ = x.shape
    # the kernel reads 16 bytes at once; clone, since contiguous() keeps odd strides at B = T = 1
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8 or x.storage_offset() % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    # the kernel computes addresses in 32 bits and is silently wrong beyond: halves
    if batch > 1 and batch * x.stride(0) > _KERNEL_MAX_ELEMENTS:
        half = batch // 2
        halves = [(x[:half], initial_state[:half]), (x[half:], initial_state[half:])]
        return torch.cat([_convolve_with_kernel(part, weight, bias, state) for part, state in halves])
    if length * x.stride(1) > _KERNEL_MAX_ELEMENTS:
        half = length // 2
        halves = [(x[:, :half], initial_state), (x[:, half:], x[:, half - initial_state.shape[2] : half].mT)]
        return torch.cat([_convolve_with_kernel(part, weight, bias, state) for part, state in halves], dim=1)
    # with a state, channels must be contiguous in both
    state = initial_state.to(x.dtype).mT.contiguous().mT
    return causal_conv1d_fn(x.mT, weight, bias, initial_states=state, activation="silu").mT


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> Tensor:
    """a_t in the dtype of the weights, (B, T, C), as K shifted products over the whole sequence."""
    taps, length = weight.shape[1], x.shape[1]
    a = torch.addcmul(bias, x, weight[:, -1])
    history = initial_state.mT
    for shift in range(1, taps):
        tap = weight[:, taps - 1 - shift]
        a[:, shift:].addcmul_(x[:, : max(length - shift, 0)], tap)
        head = min(shift, length)
        a[:, :head].addcmul_(history[:, taps - 1 - shift : taps - 1 - shift + head], tap)
    return a


class _CausalConvSiLU(torch.autograd.Function):
    """`_convolve` and SiLU; keeps only the inputs and recomputes a_t in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, initial_state)
        return silu(_convolve(x, weight, bias, initial_state), inplace=True).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(grad_y.device.type, enabled=False):  # also where backward() is called inside autocast
            return _CausalConvSiLU._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, initial_state = ctx.saved_tensors
        taps, length = weight.shape[1], x.shape[1]
        a = _convolve(x, weight, bias, initial_state)
        grad_a = torch.ops.aten.silu_backward(grad_y.to(a.dtype), a)
        grad_x = grad_a * weight[:, -1]
        grad_weight, grad_initial = torch.empty_like(weight), torch.zeros_like(initial_state)
        grad_weight[:, -1] = (grad_a * x).sum((0, 1))
        history, grad_history = initial_state.mT, grad_initial.mT
        for shift in range(1, taps):
            k, head = taps - 1 - shift, min(shift, length)
            past = slice(k, k + head)
            shifted = x[:, : max(length - shift, 0)].to(a.dtype)
            grad_x[:, : shifted.shape[1]].addcmul_(grad_a[:, shift:], weight[:, k])
            grad_history[:, past].addcmul_(grad_a[:, :head], weight[:, k])
            grad_weight[:, k] = (grad_a[:, shift:] * shifted).sum((0, 1))
            grad_weight[:, k] += (grad_a[:, :head] * history[:, past]).sum((0, 1))
        return grad_x.to(x.dtype), grad_weight, grad_a.sum((0, 1)), grad_initial
