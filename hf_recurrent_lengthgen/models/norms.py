"""RMS norms; statistics in float32 or better."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` over the last dimension."""
    return rms_norm(x, x.shape[-1:], None, eps)


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last dimension; without a weight unless `affine`."""

    weight: Any

    def __init__(self, size: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(size)) if affine else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = rms_normalize(x, self.eps)
        return normed if self.weight is None else self.weight * normed
