"""Mamba-2 with a state as argument and result, on the parameter names of Transformers.

Glossary (Dao & Gu 2024, arXiv:2405.21060 -> here): Delta -> dt, A -> -exp(A_log), h -> state.recurrent,
heads H of P channels, N state_size, G n_groups.

Different from `transformers.models.mamba2`: the mixer takes and returns a `LayerState`, takes right-padded
rows, and computes convolution and recurrence in full precision (the kernels in their own).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import initialization as init

from .causal_conv import CausalConv1d, causal_conv1d_fn
from .causal_lm import StatefulForCausalLM
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .gated_norm import GatedRMSNorm
from .layers_mamba_block import MixerBackbone, init_mamba_mixer
from .recurrent_state import LayerShape, LayerState

# for users of a checkpoint without the package
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_mixer import ScanMixer
from .scan_ssd import mamba_chunk_scan_combined, piece_ssd, scan_ssd
from .sequence_classification import StatefulForSequenceClassification

NO_LIMIT = (0.0, math.inf)  # of step sizes, which softplus makes positive
KERNEL_AVAILABLE = mamba_chunk_scan_combined is not None and causal_conv1d_fn is not None


class StatefulMamba2Mixer(ScanMixer):
    """Projections, short convolution, SSD recurrence, gated norm.

    Parameters are named and laid out as in `transformers` and mamba-ssm: `in_proj` rows are [z, x, B, C, dt].
    """

    scan = staticmethod(scan_ssd)
    piece = staticmethod(piece_ssd)
    recurrence = "ssd"
    grows = "state_size"

    def __init__(self, config: StatefulMamba2Config, layer: int) -> None:
        super().__init__(config, KERNEL_AVAILABLE)
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.state_size = config.state_size_of(layer)
        self.n_groups = config.n_groups
        inner, bc = config.num_heads * config.head_dim, config.n_groups * self.state_size
        self.inner_size = inner
        self.conv_size = inner + 2 * bc
        self.in_proj = nn.Linear(config.hidden_size, inner + self.conv_size + config.num_heads, bias=config.use_bias)
        self.conv1d = CausalConv1d.depthwise(self.conv_size, config.conv_kernel, config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.D = nn.Parameter(torch.empty(config.num_heads))
        self.norm = GatedRMSNorm(inner, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N) and (H*P + 2*G*N, K-1)."""
        return LayerShape(
            (self.num_heads, self.head_dim, self.state_size), (self.conv_size, self.config.conv_kernel - 1)
        )

    @property
    def conv_parts(self) -> dict[str, int]:
        """x, B and C."""
        bc = self.n_groups * self.state_size
        return {"x": self.inner_size, "B": bc, "C": bc}

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        """See `StatefulBackbone`."""
        backend = self.backend_for(hidden_states)
        gate, conv_input, dt = self.in_proj(hidden_states).split([self.inner_size, self.conv_size, self.num_heads], -1)
        conv_output, conv_state = self.conv1d(conv_input, state.conv, rows, backend)
        x, B, C = conv_output.split([self.inner_size, *[self.n_groups * self.state_size] * 2], -1)

        wide = state.recurrent.dtype
        dt = softplus(dt.to(wide) + self.dt_bias.to(wide))
        if (limit := tuple(self.config.time_step_limit)) != NO_LIMIT:
            dt = dt.clamp(*limit)
        dt = zero_past_end(dt, rows)
        tokens = x.shape[:2]
        x = x.view(*tokens, self.num_heads, self.head_dim)
        B, C = (part.view(*tokens, self.n_groups, self.state_size) for part in (B, C))
        A, D = -self.A_log.to(wide).exp(), self.D.to(wide)
        options: dict[str, Any] = {"chunk_size": self.config.chunk_size} if backend == "kernel" else {}
        y, state = self.advance(x, dt, A, B, C, D, state=state, rows=rows, backend=backend, **options)
        y = self.norm(y.flatten(2), gate)
        return self.out_proj(y.to(hidden_states.dtype)), state._replace(conv=conv_state)

    @torch.no_grad()
    def init_weights(self) -> None:
        """A = -(1..H) as in Transformers, or U(-16, -1) as in mamba-ssm; and see `init_mamba_mixer`."""
        if self.config.initialization == "mamba-ssm":
            rates = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16)
        else:
            rates = torch.arange(1, self.num_heads + 1, device=self.A_log.device, dtype=torch.float32)
        init.copy_(self.A_log, rates.log())
        init_mamba_mixer(self, self.config, self.dt_bias)


class StatefulMamba2Model(MixerBackbone):
    config_class = StatefulMamba2Config
    mixer_class = StatefulMamba2Mixer


class StatefulMamba2ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulMamba2Model


class StatefulMamba2ForSequenceClassification(StatefulForSequenceClassification):
    backbone_class = StatefulMamba2Model
