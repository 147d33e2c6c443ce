"""Kimi Delta Attention (KDA) with a state as argument and result, on the parameter names of fla.

Glossary (Kimi Team 2025, arXiv:2510.26692, Eq. 1 -> here): alpha_t -> exp(g_t), beta_t -> beta, S -> state.recurrent
(transposed), heads H of N = d_k keys and P = d_v values. What differs from fla's layer is in layers_delta.py.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import initialization as init

from .configuration_stateful_kda import StatefulKDAConfig
from .layers_delta import DeltaMixer, init_decays, l2_norm
from .layers_fla import MixerMLPBackbone
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .state_value import LayerState


class StatefulKDAMixer(DeltaMixer):
    """The delta rule with a decay per channel of the keys, and a sigmoid gate of low rank on the outputs."""

    def __init__(self, config: StatefulKDAConfig, layer: int) -> None:
        super().__init__(config, layer)
        D, H, N, P = config.hidden_size, self.heads, self.key_dim, self.value_dim
        rank = config.gate_rank
        self.f_proj = nn.Sequential(nn.Linear(D, rank, bias=False), nn.Linear(rank, H * N, bias=False))
        self.b_proj = nn.Linear(D, H, bias=False)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H * N))
        self.g_proj = nn.Sequential(nn.Linear(D, rank, bias=False), nn.Linear(rank, H * P))

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        x, wide, bound = hidden_states, state.recurrent.dtype, self.config.lower_bound
        backend = self.backend_for(x)
        q, k, v, conv = self.project(x, state, rows, backend)
        rate = self.A_log.to(wide).exp()[:, None]
        step = (self.f_proj(x).to(wide) + self.dt_bias.to(wide)).unflatten(-1, (self.heads, -1))
        g = -rate * softplus(step) if bound is None else bound * (rate * step).sigmoid()
        beta = self.b_proj(x).to(wide).sigmoid()
        y, state = self.rule(l2_norm(q, backend), l2_norm(k, backend), v, g, beta, state, rows, backend)
        y = self.o_norm(y, self.g_proj(x), backend, "sigmoid")
        return self.o_proj(y), state._replace(conv=conv)

    def init_weights(self) -> None:
        """Decays as in fla."""
        init_decays(self.A_log, self.dt_bias, 1)
        if self.config.safe_gate:
            init.zeros_(self.A_log)


class StatefulKDAModel(MixerMLPBackbone):
    config_class = StatefulKDAConfig
    mixer_class = StatefulKDAMixer


class StatefulKDAForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulKDAModel
