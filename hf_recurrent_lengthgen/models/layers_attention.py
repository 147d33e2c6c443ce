"""One head of attention in place of a mixer of the Mamba families (`attention_layers` in their configurations).

It is that of the reference models of Trockman et al. (2024, arXiv:2410.11135, Figures 2, 4 and 5): one
head, no positions. Linear attention has no feature map, y_t = sum_{j <= t} (q_t . k_j) v_j / sqrt(N), which is Eq. 12
for a Mamba layer that forgets nothing, with projections to values and outputs. Softmax attention has no state of fixed
size: its parts are empty.

Shapes: B batch, T tokens, D hidden size, N head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import initialization as init

from .configuration_stateful import optional_module
from .layers_mixer import ScanMixer
from .rows import Rows
from .rows_moved import zero_past_end
from .state_value import LayerShape, LayerState

_CHUNK = 64  # tokens of linear attention at once


class AttentionProjection(nn.Linear):
    """A linear layer without bias, initialized with Kaiming weights times `scale` like `out_proj` of the mixers.

    The initialization is here and not in the mixer, because Transformers skips modules without own parameters.
    """

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        self.scale = scale
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """See the class."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if not getattr(self.weight, "_is_hf_initialized", False):
            self.weight *= self.scale


def linear_attention(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = S_t q_t with S_t = S_{t-1} + v_t k_t^T, in chunks of Q tokens.

    Args:
        q: Queries, already scaled, (B, 1, T, N).
        k: Keys, (B, 1, T, N).
        v: Values, (B, 1, T, P).
        state: S before the first token, (B, 1, P, N).

    Returns:
        Outputs (B, 1, T, P), and S after the last token.
    """
    outputs = []
    for q_Q, k_Q, v_Q in zip(*(t.split(_CHUNK, dim=2) for t in (q, k, v)), strict=True):
        outputs.append((q_Q @ k_Q.mT).tril() @ v_Q + q_Q @ state.mT)
        state = state + v_Q.mT @ k_Q
    return torch.cat(outputs, dim=2), state


class _AttentionMixer(ScanMixer):
    """One head of causal attention: projections q, k, v and o, named as in Transformers' attention layers."""

    def __init__(self, config: Any, head_dim: int, value_dim: int) -> None:
        super().__init__(config, kernel_available=True)  # matrix products need none
        self.head_dim, self.value_dim = head_dim, value_dim
        D, scale = config.hidden_size, config.num_hidden_layers**-0.5 if config.rescale_prenorm_residual else 1.0
        self.q_proj = AttentionProjection(D, head_dim)
        self.k_proj = AttentionProjection(D, head_dim)
        self.v_proj = AttentionProjection(D, value_dim)
        self.o_proj = AttentionProjection(value_dim, D, scale)


class SoftmaxAttentionMixer(_AttentionMixer):
    """One head of causal softmax attention over the tokens of the call."""

    scan = staticmethod(scaled_dot_product_attention)

    @property
    def state_shape(self) -> LayerShape:
        """Both parts are empty."""
        return LayerShape((0,), (0,))

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        """See `StatefulBackbone`; padding is at the end of a row, where no real token attends to it."""
        q, k, v = (projection(hidden_states)[:, None] for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.scan(q, k, v, is_causal=True)[:, 0]), state


class LinearAttentionMixer(_AttentionMixer):
    """One head of causal linear attention, with values of D channels."""

    scan = staticmethod(linear_attention)

    @property
    def state_shape(self) -> LayerShape:
        """(1, D, N), and no convolution."""
        return LayerShape((1, self.value_dim, self.head_dim), (0,))

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, dtype = q * self.head_dim**-0.5, zero_past_end(k, rows), q.dtype
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (part[:, None].to(state.recurrent.dtype) for part in (q, k, v))
            if rows is not None and rows.group is not None:
                affine_map, shared = optional_module("scan_affine").affine_linear, optional_module("rows_shared")
                y, recurrent = shared.scan_chunk(rows, self.scan, affine_map, (q, k, v), state.recurrent, {})
            else:
                y, recurrent = self.scan(q, k, v, state.recurrent)
        return self.o_proj(y[:, 0].to(dtype)), state._replace(recurrent=recurrent)


def attention_mixer(config: Any) -> ScanMixer:
    """The mixer of the layers in `config.attention_layers`."""
    head_dim = config.attention_head_dim
    if config.attention_kind == "softmax":
        head_dim = head_dim or config.hidden_size
        return SoftmaxAttentionMixer(config, head_dim, value_dim=head_dim)
    return LinearAttentionMixer(config, head_dim or config.state_size, value_dim=config.hidden_size)
