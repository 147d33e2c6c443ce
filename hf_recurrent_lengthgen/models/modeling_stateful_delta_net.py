"""DeltaNet with a state as argument and result, on the parameter names of fla.

Glossary (Yang et al. 2024, arXiv:2406.06484, Eq. 1 and section 3.3 -> here): beta_t -> beta, S -> state.recurrent,
heads H of N = d_k keys and P = d_v values; the rule does not decay, so gates are 0. What differs from fla's layer is
in layers_delta.py.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, normalize, relu

from .configuration_stateful_delta_net import StatefulDeltaNetConfig
from .layers_delta import DeltaMixer, l2_norm
from .layers_fla import MixerMLPBackbone
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .state_value import LayerState


class StatefulDeltaNetMixer(DeltaMixer):
    """The delta rule without decay."""

    def __init__(self, config: StatefulDeltaNetConfig, layer: int) -> None:
        super().__init__(config, layer, activation=config.qk_activation == "silu")
        if config.use_beta:
            self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        if config.use_gate:
            self.g_proj = nn.Linear(config.hidden_size, self.heads * self.value_dim, bias=False)

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        x, config = hidden_states, self.config
        backend = self.backend_for(x)
        q, k, v, conv = self.project(x, state, rows, backend)
        if config.qk_activation == "relu":
            q, k = relu(q), relu(k)
        elif config.qk_activation == "elu":
            q, k = elu(q) + 1, elu(k) + 1
        if config.qk_norm == "l2":
            q, k = l2_norm(q, backend), l2_norm(k, backend)
        else:
            q, k = (normalize(part, p=1, dim=-1, eps=1e-6) for part in (q, k))
        g = q.new_zeros(*x.shape[:2], self.heads, 1)
        beta = self.b_proj(x).to(q.dtype).sigmoid() if config.use_beta else torch.ones_like(g[..., 0])
        y, state = self.rule(q, k, v, g, beta, state, rows, backend)
        y = self.o_norm(y, self.g_proj(x) if config.use_gate else None, backend)
        return self.o_proj(y), state._replace(conv=conv)


class StatefulDeltaNetModel(MixerMLPBackbone):
    config_class = StatefulDeltaNetConfig
    mixer_class = StatefulDeltaNetMixer


class StatefulDeltaNetForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulDeltaNetModel
