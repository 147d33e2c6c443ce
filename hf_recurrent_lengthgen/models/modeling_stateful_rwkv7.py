"""RWKV-7 with a state as argument and result, on the parameter names of fla.

Glossary (Peng et al. 2025, "RWKV-7 Goose", arXiv:2503.14456, section 4 -> here): mu -> x_*, w_t -> exp(log_decay),
kappa and its norm -> kappa, a_t -> rate, k tilde -> k, nu -> v_lora, rho -> r_k, wkv -> state.recurrent, xi -> k_k,
alpha -> k_a, heads H of N keys and P values.

    S_t = S_{t-1} (diag(w_t) - kappa_t (kappa_t * a_t)^T) + v_t k_t^T        (Eq. 17, the recurrence of `scan_dplr`)

Different from fla's layer: the mixers take and return their part of a `LayerState`, take right-padded
rows, decays, kappa and recurrence are in full precision, and kappa is normed as in the authors' code, where fla's
`fuse_norm` adds 1e-6 to its squared norm.

Shapes: B batch, T tokens, D hidden size, V values of all heads.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, relu
from transformers import initialization as init

from .configuration_stateful_rwkv7 import StatefulRWKV7Config
from .layers_rwkv import HeadNorm, LowRank, RWKVBackbone, RWKVTimeMixing, token_shift
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_delta import NORMED_BY_HEAD, chunk_dplr_delta_rule, kernel_limit_of, scan_dplr
from .state_value import LayerState

DECAY_RATE = math.exp(-0.5)  # the largest
L2_PENALTY = 1e-4


class StatefulRWKV7TimeMixing(RWKVTimeMixing):
    """Token shifts, projections, first layer's values, recurrence of diagonal plus low rank, norm per head, gate."""

    scan = staticmethod(scan_dplr)
    grows = "num_heads"
    why_not_inherit = NORMED_BY_HEAD

    def __init__(self, config: StatefulRWKV7Config, layer: int) -> None:
        super().__init__(config, chunk_dplr_delta_rule is not None)
        D, self.layer = config.hidden_size, layer
        self.heads, self.key_dim, self.value_dim = config.heads_of(layer)
        values = self.heads * self.value_dim
        self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g = (
            nn.Parameter(torch.empty(1, 1, D)) for _ in range(6)
        )
        self.k_k = nn.Parameter(torch.empty(D))
        self.k_a = nn.Parameter(torch.empty(D))
        self.r_k = nn.Parameter(torch.empty(self.heads, self.key_dim))
        self.r_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, values, bias=False)
        self.o_proj = nn.Linear(values, D, bias=False)
        self.w_lora = LowRank(D, config.decay_low_rank_dim, D, nn.Tanh())
        self.v_lora = LowRank(D, config.v_low_rank_dim, values, nn.Identity()) if layer else None
        self.a_lora = LowRank(D, config.a_low_rank_dim, D, nn.Identity())
        self.g_lora = LowRank(D, config.gate_low_rank_dim, values, nn.Sigmoid(), bias=False)
        eps = self.key_dim * config.norm_eps if config.group_norm_eps is None else config.group_norm_eps
        self.g_norm = HeadNorm(values, eps)

    def kernel_limit(self, dtype: torch.dtype) -> str:
        return super().kernel_limit(dtype) or kernel_limit_of(self.key_dim)

    def forward(
        self, x: Tensor, state: LayerState, rows: Rows | None = None, first_values: Tensor | None = None
    ) -> tuple[Tensor, LayerState] | tuple[Tensor, LayerState, Tensor]:
        """Run T tokens; arguments as in `StatefulBackbone`, with the time mixing's part of the state.

        The first layer also returns its values (B, T, V), which all later ones take as `first_values`. A layer that
        handed them on would return its own input, after whose gradient FSDP would gather it again.
        """
        backend = self.backend_for(x)
        shifted, shift_state = token_shift(x, state.conv, rows)
        delta, wide = shifted - x, state.recurrent.dtype
        r = self.r_proj(torch.addcmul(x, delta, self.x_r))
        k = self.k_proj(torch.addcmul(x, delta, self.x_k))
        x_v = torch.addcmul(x, delta, self.x_v)
        own_values = v = self.v_proj(x_v)
        if self.v_lora is not None:
            assert first_values is not None
            v = torch.lerp(v, first_values, self.v_lora(x_v).sigmoid())
        rate = self.a_lora(torch.addcmul(x, delta, self.x_a)).sigmoid()
        log_decay = -DECAY_RATE * self.w_lora(torch.addcmul(x, delta, self.x_w)).to(wide).sigmoid()
        kappa, k = (k * self.k_k).to(wide), k * (1 + (rate - 1) * self.k_a)
        r, k, v, log_decay, kappa, rate = (
            part.unflatten(-1, (self.heads, -1))
            for part in (r, zero_past_end(k, rows), v, zero_past_end(log_decay, rows), kappa, rate)
        )
        kappa = zero_past_end(normalize(kappa, dim=-1), rows)
        inputs = r, k, v, log_decay, -kappa, kappa * rate
        y, state = self.advance(*inputs, state=state, rows=rows, backend=backend)
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        y = (self.g_norm(y) + bonus.flatten(2)) * self.g_lora(torch.addcmul(x, delta, self.x_g))
        y, state = self.o_proj(y), state._replace(conv=shift_state)
        return (y, state, own_values) if first_values is None else (y, state)

    @torch.no_grad()
    def init_weights(self) -> None:
        """By depth and channel, as in fla and the authors' training code; the output is zero."""
        layers, D, N = self.config.num_hidden_layers, self.config.hidden_size, self.key_dim
        deep, shallow = self.layer / max(1, layers - 1), 1 - self.layer / layers
        channel = torch.arange(D, device=self.k_k.device)
        place = channel / max(1, D - 1)
        zigzag = 2 * (channel % N) / max(1, N - 1) - 1
        zigzag = zigzag * zigzag.abs()
        for name, power in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            init.copy_(self.get_parameter(f"x_{name}"), (1 - (channel / D) ** (power * shallow)).view(1, 1, D))
        init.copy_(self.k_k, 0.71 - 0.1 * (place - 0.5))
        init.constant_(self.k_a, 1.02)
        init.constant_(self.r_k, -0.04)
        init.constant_(self.g_norm.weight, ((self.layer + 1) / layers) ** 0.7)
        for projection, gain in ((self.r_proj, 1.0), (self.k_proj, 0.1), (self.v_proj, 1.0)):
            init.orthogonal_(projection.weight, gain=gain)
        init.zeros_(self.o_proj.weight)
        for low_rank in (module for module in self.children() if isinstance(module, LowRank)):
            low_rank.initialize()
        init.copy_(self.w_lora.bias, -5.5 + 6 * place ** (1 + deep**0.3) + 2.5 * zigzag)
        init.copy_(self.a_lora.bias, -0.19 + 0.3 * zigzag + 0.4 * (place - 0.5))
        if self.v_lora is not None:
            values = self.v_lora.bias.numel()
            place = torch.arange(values, device=place.device) / max(1, values - 1)
            init.copy_(self.v_lora.bias, 0.73 - 0.4 * (place - 0.5))


class StatefulRWKV7ChannelMixing(nn.Module):
    """`value(relu(key)^2)`; without a width, it is rounded up to a multiple of 32."""

    def __init__(self, config: StatefulRWKV7Config, layer: int) -> None:
        super().__init__()
        D, size = config.hidden_size, config.intermediate_size
        if size is None:
            size = -(-int(D * (config.hidden_ratio or 4)) // 32) * 32
        self.shallow = 1 - layer / config.num_hidden_layers
        self.x_k = nn.Parameter(torch.empty(D))
        self.key = nn.Linear(D, size, bias=False)
        self.value = nn.Linear(size, D, bias=False)

    def forward(self, x: Tensor, state: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (B, T, D) and the last real input, (B, D, 1), from the one before the first token."""
        shifted, state = token_shift(x, state, rows)
        return self.value(relu(self.key(torch.addcmul(x, shifted - x, self.x_k))).square()), state

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in fla and the authors' training code; the output is zero."""
        channel = torch.arange(self.x_k.numel(), device=self.x_k.device) / self.x_k.numel()
        init.copy_(self.x_k, 1 - channel ** (self.shallow**4))
        init.orthogonal_(self.key.weight)
        init.zeros_(self.value.weight)


class StatefulRWKV7Model(RWKVBackbone):
    config_class = StatefulRWKV7Config
    time_mixing = StatefulRWKV7TimeMixing
    channel_mixing = StatefulRWKV7ChannelMixing

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -1e-4, 1e-4)


class StatefulRWKV7ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulRWKV7Model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.lm_head:
            gain = 0.5 * max(1.0, self.config.vocab_size / self.config.hidden_size) ** 0.5
            init.orthogonal_(self.get_parameter("lm_head.weight"), gain=gain)

    @property
    def can_skip_logits(self) -> bool:
        """Not with L2Wrap, whose mean is over all logits."""
        return super().can_skip_logits and not self.config.use_l2warp

    def _loss_of(self, logits: Tensor, *targets: Any) -> Tensor | None:
        """As of every family; with L2Wrap, the gradients (not the value) of 1e-4 / 2 times the mean squared largest
        logit are added."""
        loss = super()._loss_of(logits, *targets)
        if loss is None or not self.config.use_l2warp:
            return loss
        penalty = L2_PENALTY / 2 * logits.amax(-1).square().mean()
        return loss + (penalty - penalty.detach())
