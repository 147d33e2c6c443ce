"""HGRN-2 with a state as argument and result, on the parameter names of fla.

Glossary (Qin et al. 2024, arXiv:2404.07904, Eq. 6 -> here): forget gate f_t -> exp(g_t), input gate 1 - f_t -> k,
i_t -> i_proj, o_t -> q. It is the recurrence of GLA with keys that are one minus the decay.

Different from fla's layer, in addition to the state and right-padded rows: gates and recurrence are in full precision.
As in fla, the norm of the outputs spans all heads, and its epsilon is 1e-5 whatever `norm_eps` says.

Shapes: B batch, T tokens, D hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu
from transformers import initialization as init

from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .layers_conv import ShortConvMixer, causal_conv1d_fn
from .layers_fla import MixerMLPBackbone, RMSNorm
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_gla import chunk_gla, scan_gla
from .state_value import LayerState, state_dtype


class StatefulHGRN2Mixer(ShortConvMixer):
    """Projections, optional short convolutions, gated recurrence, norm."""

    scan = staticmethod(scan_gla)
    grows = "num_heads"

    def __init__(self, config: StatefulHGRN2Config, layer: int) -> None:
        super().__init__(config, chunk_gla is not None and (causal_conv1d_fn is not None or not config.use_short_conv))
        self.heads, self.key_dim = config.heads_of(layer)
        self.value_dim = self.key_dim
        D = config.hidden_size
        self.q_proj = nn.Linear(D, D, bias=False)
        self.f_proj = nn.Linear(D, D, bias=False)
        self.i_proj = nn.Linear(D, D, bias=False)
        self.add_convolutions("", q=D, f=D, i=D)
        self.g_norm = RMSNorm(D, 1e-5, affine=config.elementwise_affine)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None, *lower_bound: Tensor
    ) -> tuple[Tensor, LayerState]:
        """See `StatefulBackbone`; `lower_bound` (D,) bounds the forget gates, at 0 if it is left out."""
        backend = self.backend_for(hidden_states)
        parts = [self.q_proj(hidden_states), self.f_proj(hidden_states), self.i_proj(hidden_states)]
        (q, f, v), conv_state = self.convolve(parts, state.conv, rows, backend)
        f = f.to(state.recurrent.dtype)
        g, k = logsigmoid(f), torch.sigmoid(-f)
        for bound in lower_bound:
            # f = bound + (1 - bound) sigmoid: its logarithm, and one minus it, without cancellation
            g, k = torch.logaddexp(bound.log(), torch.log1p(-bound) + g), (1 - bound) * k
        q, k, v, g = (
            x.unflatten(-1, (self.heads, -1))
            for x in (silu(q) * self.key_dim**-0.5, zero_past_end(k, rows), v, zero_past_end(g, rows))
        )
        y, state = self.advance(q, k, v, g, state=state, rows=rows, backend=backend)
        return self.o_proj(self.g_norm(y.flatten(2))), state._replace(conv=conv_state)


class StatefulHGRN2Model(MixerMLPBackbone):
    config_class = StatefulHGRN2Config
    mixer_class = StatefulHGRN2Mixer

    def make_layers(self, config: StatefulHGRN2Config) -> nn.ModuleList:
        """As of every backbone, and the lower bounds of the forget gates."""
        if config.use_lower_bound:
            self.lower_bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, config.hidden_size))
        return super().make_layers(config)

    def layer_inputs(self) -> list[tuple[Tensor, ...]]:
        """The lower bounds of each layer's forget gates, (D,); none in the first layer (Qin et al. 2024, Eq. 7)."""
        if not self.config.use_lower_bound:
            return super().layer_inputs()
        shares = self.lower_bounds.to(state_dtype(self.lower_bounds.dtype)).softmax(0)
        limits = torch.finfo(shares.dtype)  # rounding may give 0 or 1, where logarithms have no gradient
        return [(), *((bound.clamp(limits.tiny, 1 - limits.eps),) for bound in shares[1:].cumsum(0))]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.use_lower_bound:
            init.zeros_(self.lower_bounds)


class StatefulHGRN2ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulHGRN2Model
