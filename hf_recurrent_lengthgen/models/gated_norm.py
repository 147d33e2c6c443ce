"""The norm of Mamba-2's gated outputs; statistics in float32 or better.

Shapes: B batch, T tokens, D channels, G groups of D / G channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from .causal_conv import token_blocks
from .recurrent_state import state_dtype
from .scan_backends import backward_once


class GatedRMSNorm(nn.Module):
    """`RMSNorm(x * silu(gate))` over groups of channels, statistics in float32 or better."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.shape[1] == 1 and not torch.is_grad_enabled():
            return _normed(x, gate, self.weight, self.groups, self.eps)
        return _GatedRMSNorm.apply(x, gate, self.weight, self.groups, self.eps)


class _GatedRMSNorm(torch.autograd.Function):
    """With v = x silu(gate), n = v / rms(v) in each group: y = weight n.

    dv = (dn - n mean(dn n)) / rms(v). Keeps only the inputs, and goes block by block of tokens, so that the passes
    over a block find it in the cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.groups, ctx.eps = groups, eps
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
        for block in token_blocks(x):
            y[:, block] = _normed(x[:, block], gate[:, block], weight, groups, eps)
        return y

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
        grad_weight = torch.zeros_like(weight, dtype=state_dtype(weight.dtype))  # a sum over blocks
        for block in token_blocks(x):
            wide_gate = _widen(gate[:, block])
            swish = silu(wide_gate)
            v, inverse_rms = _gate(x[:, block], swish, ctx.groups, ctx.eps)
            n = v.mul_(inverse_rms)
            wide_grad_y = _widen(grad_y[:, block])
            grad_weight += (wide_grad_y * n.flatten(-2)).sum((0, 1))
            grad_n = (wide_grad_y * weight).unflatten(-1, (ctx.groups, -1))
            grad_v = grad_n.addcmul_(n, (grad_n * n).mean(-1, keepdim=True), value=-1).mul_(inverse_rms).flatten(-2)
            grad_x[:, block] = grad_v * swish
            grad_gate[:, block] = torch.ops.aten.silu_backward(grad_v * x[:, block], wide_gate)
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None


def _normed(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """y, with nothing kept."""
    v = x * silu(_widen(gate))
    n = rms_norm(v.view(*v.shape[:-1], groups, -1), (v.shape[-1] // groups,), None, eps)  # unflatten is slow
    return weight * n.flatten(-2).to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(state_dtype(x.dtype))


def _gate(x: Tensor, swish: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """v and 1 / rms(v) of each group, (B, Q, G, C / G) and (B, Q, G, 1)."""
    v = (x * swish).unflatten(-1, (groups, -1))
    return v, torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
