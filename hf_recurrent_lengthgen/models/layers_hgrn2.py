"""The HGRN-2 layer with a state as argument and result, on the parameter names of fla.

Glossary (Qin et al. 2024, arXiv:2404.07904, Eq. 6 -> here): forget gate f_t -> exp(g_t), input gate 1 - f_t -> k,
i_t -> i_proj, o_t -> q. It is the recurrence of GLA with keys that are one minus the decay.

Different from fla's layer: the mixer takes and returns a `LayerState`, takes right-padded rows by their lengths, and
computes gates and recurrence in full precision. As in fla, the norm of the outputs spans all heads, and its epsilon is
1e-5 whatever `norm_eps` says.

Shapes: B batch, T tokens, D hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from .causal_conv import CausalConv1d
from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .layers_fla import OptionalRMSNorm, choose_backend, short_convolutions
from .padding import zero_past_end
from .recurrent_state import LayerShape, LayerState
from .scan_backends import check_backend_setting
from .scan_gla import chunk_gla, scan_gla
from .scan_mixer import ScanMixer


class StatefulHGRN2Mixer(ScanMixer):
    """Projections, optional short convolutions, gated recurrence, norm."""

    scan = staticmethod(scan_gla)
    grows = "num_heads"

    def __init__(self, config: StatefulHGRN2Config, layer: int) -> None:
        super().__init__()
        check_backend_setting(config.scan_backend, chunk_gla is not None)
        self.config = config
        self.heads, self.head_dim = config.heads_of(layer)
        D = config.hidden_size
        self.q_proj = nn.Linear(D, D, bias=False)
        self.f_proj = nn.Linear(D, D, bias=False)
        self.i_proj = nn.Linear(D, D, bias=False)
        if config.use_short_conv:
            self.q_conv1d = CausalConv1d.depthwise(D, config.conv_size, bias=False, activation=False)
            self.f_conv1d = CausalConv1d.depthwise(D, config.conv_size, bias=False, activation=False)
            self.i_conv1d = CausalConv1d.depthwise(D, config.conv_size, bias=False, activation=False)
        self.g_norm = OptionalRMSNorm(D, 1e-5, affine=config.elementwise_affine)
        self.o_proj = nn.Linear(D, D, bias=False)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N), and with short convolutions (3*D, K-1)."""
        conv = (3 * self.config.hidden_size, self.config.conv_size - 1) if self.config.use_short_conv else (0,)
        return LayerShape((self.heads, self.head_dim, self.head_dim), conv)

    @property
    def conv_parts(self) -> dict[str, int]:
        """q, k (the forget gate) and v."""
        return dict.fromkeys(("q", "k", "v"), self.config.hidden_size) if self.config.use_short_conv else {}

    def forward(
        self, hidden_states: Tensor, state: LayerState, lengths: Tensor | None = None, *lower_bound: Tensor
    ) -> tuple[Tensor, LayerState]:
        """See `StatefulBackbone`; `lower_bound` (D,) of the forget gates, none for 0."""
        config = self.config
        taps, channels = (config.conv_size, 3 * config.hidden_size) if config.use_short_conv else (0, 0)
        backend = choose_backend(config.scan_backend, hidden_states, chunk_gla is not None, taps, channels)
        q, f, v = self.q_proj(hidden_states), self.f_proj(hidden_states), self.i_proj(hidden_states)
        conv_state = state.conv
        if config.use_short_conv:
            convolutions = {"q_conv1d": self.q_conv1d, "f_conv1d": self.f_conv1d, "i_conv1d": self.i_conv1d}
            (q, f, v), conv_state = short_convolutions(convolutions, [q, f, v], state.conv, lengths, backend)
        f = f.to(state.recurrent.dtype)
        g, k = logsigmoid(f), torch.sigmoid(-f)
        for bound in lower_bound:
            # f = bound + (1 - bound) sigmoid: its logarithm, and one minus it, without cancellation
            g, k = torch.logaddexp(bound.log(), torch.log1p(-bound) + g), (1 - bound) * k
        q, k, v, g = (
            x.unflatten(-1, (self.heads, -1))
            for x in (silu(q) * self.head_dim**-0.5, zero_past_end(k, lengths), v, zero_past_end(g, lengths))
        )
        y, state = self.advance(q, k, v, g, state=state, lengths=lengths, backend=backend)
        return self.o_proj(self.g_norm(y.flatten(2))), state._replace(conv=conv_state)
