"""What the mixers of DeltaNet, Gated DeltaNet and Kimi Delta Attention share, on the parameter names of fla.

Different from fla's layers, in addition to the state and right-padded rows: gates, rates, the norms of queries and
keys and the recurrence are in full precision.

Shapes: B batch, T tokens, D hidden size, H heads of values, N key dim, P value dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import initialization as init

from .layers_conv import ShortConvMixer, causal_conv1d_fn
from .layers_fla import HeadRMSNorm
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_backends import ScanBackend
from .scan_delta import NORMED_BY_HEAD, chunk_gated_delta_rule, kernel_limit_of, scan_delta
from .scan_fla_kernels import fla_kernel, fused
from .state_value import LayerState

KERNEL_AVAILABLE = chunk_gated_delta_rule is not None and causal_conv1d_fn is not None
fla_l2norm = fla_kernel("fla.modules.norm.l2norm", "l2norm")
_NORM_EPS = 1e-6  # of fla's kernels


class DeltaMixer(ShortConvMixer):
    """Projections, short convolutions, delta rule, norm per head. A subclass adds its gates."""

    scan = staticmethod(scan_delta)
    grows = "num_heads"
    why_not_inherit = NORMED_BY_HEAD

    def __init__(self, config: Any, layer: int, activation: bool = True) -> None:
        """`activation`: whether SiLU follows the convolutions of queries and keys."""
        super().__init__(
            config, KERNEL_AVAILABLE or (chunk_gated_delta_rule is not None and not config.use_short_conv)
        )
        self.key_heads, self.heads, self.key_dim, self.value_dim = config.heads_of(layer)
        D, keys, values = config.hidden_size, self.key_heads * self.key_dim, self.heads * self.value_dim
        self.q_proj = nn.Linear(D, keys, bias=False)
        self.k_proj = nn.Linear(D, keys, bias=False)
        self.v_proj = nn.Linear(D, values, bias=False)
        self.add_convolutions("qkv" if activation else "v", q=keys, k=keys, v=values)
        self.activation = activation
        self.o_norm = HeadRMSNorm(self.value_dim, config.norm_eps)
        self.o_proj = nn.Linear(values, D, bias=False)

    def kernel_limit(self, dtype: torch.dtype) -> str:
        return super().kernel_limit(dtype) or kernel_limit_of(self.key_dim)

    def project(
        self, x: Tensor, state: LayerState, rows: Rows | None, backend: ScanBackend
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys (B, T, heads of keys, N), values (B, T, H, P), and the conv part of the state."""
        parts, conv = self.convolve([self.q_proj(x), self.k_proj(x), self.v_proj(x)], state.conv, rows, backend)
        if not self.config.use_short_conv:
            parts = [silu(part) if self.activation or index == 2 else part for index, part in enumerate(parts)]
        q, k, v = parts
        q, k = (part.unflatten(-1, (self.key_heads, -1)).to(state.recurrent.dtype) for part in (q, k))
        return q, k, v.unflatten(-1, (self.heads, -1)), conv

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: LayerState,
        rows: Rows | None,
        backend: ScanBackend,
    ) -> tuple[Tensor, LayerState]:
        """Outputs (B, T, H, P) in the dtype of v, and the state; g (B, T, H, N) or (B, T, H, 1), beta (B, T, H)."""
        beta = zero_past_end(beta * 2 if self.config.allow_neg_eigval else beta, rows)
        q, g = q * self.key_dim**-0.5, zero_past_end(g, rows)
        y, state = self.advance(q, k, v, g, beta, state=state, rows=rows, backend=backend)
        return y.to(v.dtype), state


def l2_norm(x: Tensor, backend: ScanBackend) -> Tensor:
    """`x` (B, T, H, N) divided by its norm over the last dimension."""
    if fused(fla_l2norm, x, backend):
        return fla_l2norm(x, _NORM_EPS)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


@torch.no_grad()
def init_decays(A_log: Tensor, dt_bias: Tensor, least: float) -> None:
    """Rates exp(A_log) uniform up to 16, and steps softplus(dt_bias) log-uniform from 0.001 to 0.1, as in Mamba-2."""
    init.uniform_(A_log, least, 16)
    init.copy_(A_log, A_log.log())
    dt = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp().clamp(min=1e-4)
    init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))
