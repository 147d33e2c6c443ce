"""GLA with a state as argument and result, on the parameter names of fla.

Glossary (Yang et al. 2023, arXiv:2312.06635, section 4.4 -> here): alpha_t -> exp(g_t), tau -> gate_logit_normalizer,
S -> state.recurrent (transposed), heads H of N = d_k keys and P = d_v values.

Different from fla's layer, in addition to the state and right-padded rows: each layer has its own number of heads, and
gates and recurrence are in full precision.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, logsigmoid, relu, silu

from .configuration_stateful_gla import StatefulGLAConfig
from .layers_conv import ShortConvMixer, causal_conv1d_fn
from .layers_fla import HeadRMSNorm, MixerMLPBackbone
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_backends import repeat_heads
from .scan_gla import chunk_gla, scan_gla
from .state_value import LayerState

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": logsigmoid,
    "silu": silu,
    "swish": silu,
    "sqrelu": lambda x: relu(x).square(),
    "gelu": lambda x: gelu(x, approximate="tanh"),
}


class StatefulGLAMixer(ShortConvMixer):
    """Projections, optional short convolutions, gated recurrence, norm per head, output gate."""

    scan = staticmethod(scan_gla)
    grows = "num_heads"

    def __init__(self, config: StatefulGLAConfig, layer: int) -> None:
        super().__init__(config, chunk_gla is not None and (causal_conv1d_fn is not None or not config.use_short_conv))
        self.heads, self.key_dim, self.value_dim = config.heads_of(layer)
        self.kv_heads = config.num_kv_heads or self.heads
        D, keys, values = config.hidden_size, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim
        inner = self.heads * self.value_dim
        self.q_proj = nn.Linear(D, self.heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(D, keys, bias=False)
        self.v_proj = nn.Linear(D, values, bias=False)
        self.add_convolutions("qkv", q=self.heads * self.key_dim, k=keys, v=values)
        self.gk_proj = nn.Sequential(
            nn.Linear(D, config.gate_low_rank_dim, bias=False), nn.Linear(config.gate_low_rank_dim, keys)
        )
        if config.use_output_gate:
            self.g_proj = nn.Linear(D, inner, bias=False)
        # fla names the norm after the kernel that it uses
        self.norm_name = "g_norm_swish_gate" if config.fuse_norm and config.use_output_gate else "g_norm"
        self.add_module(self.norm_name, HeadRMSNorm(self.value_dim, config.norm_eps, affine=config.elementwise_affine))
        self.o_proj = nn.Linear(inner, D, bias=False)

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        config = self.config
        backend = self.backend_for(hidden_states)
        parts = [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]
        (q, k, v), conv_state = self.convolve(parts, state.conv, rows, backend)
        if config.feature_map is not None:
            q, k = FEATURE_MAPS[config.feature_map](q), FEATURE_MAPS[config.feature_map](k)
        g = logsigmoid(self.gk_proj(hidden_states).to(state.recurrent.dtype)) / config.gate_logit_normalizer
        if config.clamp_min is not None:
            g = g.clamp(min=config.clamp_min)
        k, v, g = (
            repeat_heads(x.unflatten(-1, (self.kv_heads, -1)), self.heads)
            for x in (zero_past_end(k, rows), v, zero_past_end(g, rows))
        )
        q = q.unflatten(-1, (self.heads, -1)) * self.key_dim**-0.5
        y, state = self.advance(q, k, v, g, state=state, rows=rows, backend=backend)
        gate = self.g_proj(hidden_states) if config.use_output_gate else None
        return self.o_proj(self.get_submodule(self.norm_name)(y, gate, backend)), state._replace(conv=conv_state)


class StatefulGLAModel(MixerMLPBackbone):
    config_class = StatefulGLAConfig
    mixer_class = StatefulGLAMixer


class StatefulGLAForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulGLAModel
