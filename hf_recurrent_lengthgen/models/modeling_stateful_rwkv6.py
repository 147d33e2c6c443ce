"""RWKV-6 with a state as argument and result, on the parameter names of fla.

Glossary (Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892, section 4 -> here): lerp and ddlerp with mu, lambda,
A, B -> x_proj and x_bias, w_t -> exp(log_decay), u -> bonus, wkv -> state.recurrent (transposed), heads H of N keys
and P values.

Different from fla's layer: the mixers take and return their part of a `LayerState`, take right-padded
rows, the norm of the heads has its own epsilon, and decays and recurrence are in full precision.

Shapes: B batch, T tokens, D hidden size, R rank of the token shifts.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu
from transformers import initialization as init

from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .layers_rwkv import HeadNorm, LowRank, RWKVBackbone, RWKVTimeMixing, token_shift
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_rwkv6 import chunk_rwkv6, scan_rwkv6
from .state_value import LayerState


class ShiftedLinear(nn.Module):
    """A linear map of x_t + mu * (x_{t-1} - x_t); with `mu` (D,) as a parameter, or an argument (B, T, D)."""

    def __init__(self, linear: nn.Module, size: int | None = None) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(size)) if size is not None else None
        self.linear = linear

    def forward(self, x: Tensor, delta: Tensor, mu: Tensor | None = None) -> Tensor:
        mu = self.mu if mu is None else mu
        assert mu is not None
        return self.linear(torch.addcmul(x, delta, mu))

    def init_weights(self) -> None:
        """mu = 0: no shift."""
        if self.mu is not None:
            init.zeros_(self.mu)


class StatefulRWKV6TimeMixing(RWKVTimeMixing):
    """Data-dependent token shifts, projections, recurrence with decay and bonus, norm per head, gate."""

    scan = staticmethod(scan_rwkv6)
    grows = "num_heads"

    def __init__(self, config: StatefulRWKV6Config, layer: int) -> None:
        super().__init__(config, chunk_rwkv6 is not None)
        D, R = config.hidden_size, config.proj_low_rank_dim
        self.heads, self.key_dim, self.value_dim = config.heads_of(layer)
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        # the order of the five is r, w, k, v, g
        self.x_proj = nn.Sequential(
            ShiftedLinear(nn.Linear(D, 5 * R, bias=False), D), nn.Tanh(), nn.Linear(5 * R, D, bias=False)
        )
        self.x_bias = nn.Parameter(torch.empty(5, D))
        self.r_proj = ShiftedLinear(nn.Linear(D, keys, bias=False))
        self.w_proj = ShiftedLinear(LowRank(D, config.gate_low_rank_dim, keys, nn.Tanh()))
        self.k_proj = ShiftedLinear(nn.Linear(D, keys, bias=False))
        self.v_proj = ShiftedLinear(nn.Linear(D, values, bias=False))
        self.g_proj = ShiftedLinear(nn.Linear(D, values, bias=False))
        self.bonus = nn.Parameter(torch.empty(self.heads, self.key_dim))
        eps = config.norm_eps if config.group_norm_eps is None else config.group_norm_eps
        self.g_norm = HeadNorm(values, eps)
        self.o_proj = nn.Linear(values, D, bias=False)

    def forward(self, x: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        """Run T tokens; arguments as in `StatefulBackbone`, with the time mixing's part of the state."""
        backend = self.backend_for(x)
        shifted, shift_state = token_shift(x, state.conv, rows)
        delta = shifted - x
        mu_r, mu_w, mu_k, mu_v, mu_g = self._shifts(x, delta)
        wide = state.recurrent.dtype
        k = zero_past_end(self.k_proj(x, delta, mu_k), rows)
        log_decay = zero_past_end(-self.w_proj(x, delta, mu_w).to(wide).exp(), rows)
        r, k, v, log_decay = (
            part.unflatten(-1, (self.heads, -1))
            for part in (self.r_proj(x, delta, mu_r), k, self.v_proj(x, delta, mu_v), log_decay)
        )
        y, state = self.advance(r, k, v, log_decay, self.bonus, state=state, rows=rows, backend=backend)
        y = self.g_norm(y) * silu(self.g_proj(x, delta, mu_g))
        return self.o_proj(y), state._replace(conv=shift_state)

    def _shifts(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """mu of r, w, k, v and g, (B, T, D) each."""
        hidden = self.x_proj[1](self.x_proj[0](x, delta)).unflatten(-1, (5, -1))
        # zeros around each fifth, so that the linear map is called as a module, with its adapters
        apart = torch.diag_embed(hidden.mT, dim1=-2, dim2=-1).movedim(-3, -1).flatten(-2)
        return (self.x_proj[2](apart) + self.x_bias).unbind(2)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as fla does: no shifts, decay exp(-1), small projections."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init.xavier_uniform_(module.weight, gain=2**-2.5)
        self.w_proj.linear.initialize()  # type: ignore[operator]
        init.zeros_(self.x_bias)
        init.zeros_(self.bonus)


class StatefulRWKV6ChannelMixing(nn.Module):
    """`sigmoid(receptance) * value(relu(key)^2)`; without a width, it is rounded up to a multiple of 32."""

    def __init__(self, config: StatefulRWKV6Config, layer: int) -> None:
        super().__init__()
        D, size = config.hidden_size, config.intermediate_size
        if size is None:
            size = -(-int(D * (config.hidden_ratio or 3.5)) // 32) * 32
        self.key = ShiftedLinear(nn.Linear(D, size, bias=False), D)
        self.value = nn.Linear(size, D, bias=False)
        self.receptance = ShiftedLinear(nn.Linear(D, D, bias=False), D)

    def forward(self, x: Tensor, state: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (B, T, D) and the last real input, (B, D, 1), from the one before the first token."""
        shifted, state = token_shift(x, state, rows)
        delta = shifted - x
        return self.receptance(x, delta).sigmoid() * self.value(relu(self.key(x, delta)).square()), state


class StatefulRWKV6Model(RWKVBackbone):
    config_class = StatefulRWKV6Config
    time_mixing = StatefulRWKV6TimeMixing
    channel_mixing = StatefulRWKV6ChannelMixing


class StatefulRWKV6ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulRWKV6Model
