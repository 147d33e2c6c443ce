"""Gated DeltaNet with a state as argument and result, on the parameter names of fla.

Glossary (Yang et al. 2025, arXiv:2412.06464, Eq. 10 -> here): alpha_t -> exp(g_t), beta_t -> beta, S ->
state.recurrent, heads H of N = d_k keys and P = d_v values. What differs from fla's layer is in layers_delta.py.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .configuration_stateful_gated_deltanet import StatefulGatedDeltaNetConfig
from .layers_delta import DeltaMixer, init_decays, l2_norm
from .layers_fla import MixerMLPBackbone
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .state_value import LayerState


class StatefulGatedDeltaNetMixer(DeltaMixer):
    """The delta rule with one decay per head, as in Mamba-2, and an output gate."""

    def __init__(self, config: StatefulGatedDeltaNetConfig, layer: int) -> None:
        super().__init__(config, layer)
        D = config.hidden_size
        self.a_proj = nn.Linear(D, self.heads, bias=False)
        self.b_proj = nn.Linear(D, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        if config.use_gate:
            self.g_proj = nn.Linear(D, self.heads * self.value_dim, bias=False)

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        x, wide, config = hidden_states, state.recurrent.dtype, self.config
        backend = self.backend_for(x)
        q, k, v, conv = self.project(x, state, rows, backend)
        g = -self.A_log.to(wide).exp() * softplus(self.a_proj(x).to(wide) + self.dt_bias.to(wide))
        beta = self.b_proj(x).to(wide).sigmoid()
        y, state = self.rule(l2_norm(q, backend), l2_norm(k, backend), v, g[..., None], beta, state, rows, backend)
        gate = self.g_proj(x) if config.use_gate else None
        y = self.o_norm(y, gate, backend, config.output_gate_activation)
        return self.o_proj(y), state._replace(conv=conv)

    def init_weights(self) -> None:
        """Decays as in fla."""
        init_decays(self.A_log, self.dt_bias, 0)


class StatefulGatedDeltaNetModel(MixerMLPBackbone):
    config_class = StatefulGatedDeltaNetConfig
    mixer_class = StatefulGatedDeltaNetMixer


class StatefulGatedDeltaNetForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulGatedDeltaNetModel
