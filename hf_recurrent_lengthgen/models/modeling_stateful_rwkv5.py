"""RWKV-5 with a state as argument and result, on the parameter names of the official checkpoints.

Glossary (Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892, section 4 -> here): mu -> time_mix_*, omega ->
time_decay, u -> time_faaaa, wkv -> state.recurrent (transposed), heads H of N = P keys and values. It is the
recurrence of RWKV-6 with a decay exp(-exp(time_decay)) that does not depend on the token.

Different from the official layer: the state is a value, right-padded rows are taken, and decays and
recurrence are in full precision.

Shapes: B batch, T tokens, D hidden size, A inner size.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu
from transformers import initialization as init

from .configuration_stateful_rwkv5 import StatefulRWKV5Config
from .layers_rwkv import HeadNorm, RWKVBlock, RWKVTimeMixing, token_shift
from .modeling_heads import StatefulForCausalLM
from .modeling_stateful import StatefulBackbone
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_rwkv6 import chunk_rwkv6, scan_rwkv6
from .state_value import LayerState


def _mix(x: Tensor, shifted: Tensor, time_mix: Tensor) -> Tensor:
    """time_mix x_t + (1 - time_mix) x_{t-1}."""
    return torch.addcmul(shifted, x - shifted, time_mix)


class StatefulRWKV5TimeMixing(RWKVTimeMixing):
    """Token shifts, projections, recurrence with decay and bonus, norm per head, gate."""

    scan = staticmethod(scan_rwkv6)
    grows = "num_heads"

    def __init__(self, config: StatefulRWKV5Config, layer: int) -> None:
        super().__init__(config, chunk_rwkv6 is not None)
        self.depth = layer / max(1, config.num_hidden_layers - 1), 1 - layer / config.num_hidden_layers
        D, A = config.hidden_size, config.inner_size
        self.heads, self.key_dim = head_shape = config.heads_of(layer)
        self.value_dim = self.key_dim
        self.time_decay = nn.Parameter(torch.empty(head_shape))
        self.time_faaaa = nn.Parameter(torch.empty(head_shape))
        self.time_mix_key = nn.Parameter(torch.empty(1, 1, D))
        self.time_mix_value = nn.Parameter(torch.empty(1, 1, D))
        self.time_mix_receptance = nn.Parameter(torch.empty(1, 1, D))
        self.time_mix_gate = nn.Parameter(torch.empty(1, 1, D))
        self.key = nn.Linear(D, A, bias=False)
        self.value = nn.Linear(D, A, bias=False)
        self.receptance = nn.Linear(D, A, bias=False)
        self.gate = nn.Linear(D, A, bias=False)
        self.output = nn.Linear(A, D, bias=False)
        self.ln_x = HeadNorm(A, 1e-5 * config.head_size_divisor**2)  # official code: whatever layer_norm_epsilon

    def forward(self, x: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        """Run T tokens; arguments as in `StatefulBackbone`, with the time mixing's part of the state."""
        backend = self.backend_for(x)
        shifted, shift_state = token_shift(x, state.conv, rows)
        wide = state.recurrent.dtype
        log_decay = (-self.time_decay.to(wide).exp()).flatten().expand(*x.shape[:2], -1)
        k = self.key(_mix(x, shifted, self.time_mix_key))
        r, k, v, log_decay = (
            part.unflatten(-1, (self.heads, -1))
            for part in (
                self.receptance(_mix(x, shifted, self.time_mix_receptance)),
                zero_past_end(k, rows),
                self.value(_mix(x, shifted, self.time_mix_value)),
                zero_past_end(log_decay, rows),
            )
        )
        y, state = self.advance(r, k, v, log_decay, self.time_faaaa, state=state, rows=rows, backend=backend)
        y = self.ln_x(y) * silu(self.gate(_mix(x, shifted, self.time_mix_gate)))
        return self.output(y), state._replace(conv=shift_state)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Shifts, decays and bonuses by depth and channel, as in the official training code."""
        deep, shallow = self.depth
        D, A = self.config.hidden_size, self.config.inner_size
        channel = torch.arange(D, device=self.time_decay.device).view(1, 1, D) / D
        init.copy_(self.time_mix_key, channel**shallow)
        init.copy_(self.time_mix_value, channel**shallow + 0.3 * deep)
        init.copy_(self.time_mix_receptance, channel ** (0.5 * shallow))
        init.copy_(self.time_mix_gate, channel ** (0.5 * shallow))
        inner = torch.arange(A, device=self.time_decay.device)
        place = inner / max(1, A - 1)
        init.copy_(self.time_decay, (-6 + 5 * place ** (0.7 + 1.3 * deep)).view_as(self.time_decay))
        zigzag = 0.1 * ((inner + 1) % 3 - 1)
        init.copy_(self.time_faaaa, (deep * (1 - place) + zigzag).view_as(self.time_faaaa))


class StatefulRWKV5ChannelMixing(nn.Module):
    """`sigmoid(receptance) * value(relu(key)^2)`."""

    def __init__(self, config: StatefulRWKV5Config, layer: int) -> None:
        super().__init__()
        D = config.hidden_size
        size = config.intermediate_size or int(D * 3.5) // 32 * 32
        self.shallow = 1 - layer / config.num_hidden_layers
        self.time_mix_key = nn.Parameter(torch.empty(1, 1, D))
        self.time_mix_receptance = nn.Parameter(torch.empty(1, 1, D))
        self.key = nn.Linear(D, size, bias=False)
        self.receptance = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(size, D, bias=False)

    def forward(self, x: Tensor, state: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (B, T, D) and the last real input, (B, D, 1), from the one before the first token."""
        shifted, state = token_shift(x, state, rows)
        key = relu(self.key(_mix(x, shifted, self.time_mix_key))).square()
        return self.receptance(_mix(x, shifted, self.time_mix_receptance)).sigmoid() * self.value(key), state

    @torch.no_grad()
    def init_weights(self) -> None:
        """Shifts by depth and channel, as in the official training code."""
        for parameter in (self.time_mix_key, self.time_mix_receptance):
            channel = torch.arange(parameter.numel(), device=parameter.device) / parameter.numel()
            init.copy_(parameter, (channel**self.shallow).view_as(parameter))


class StatefulRWKV5Block(RWKVBlock):
    """With the names of the official checkpoints."""

    mixer_name = "attention"
    names = ("pre_ln", "ln1", "attention", "ln2", "feed_forward")
    stored = ("pre_ln", "ln1", "ln2", "attention", "feed_forward")


class StatefulRWKV5Model(StatefulBackbone):
    config_class = StatefulRWKV5Config
    base_model_prefix = "rwkv"
    _no_split_modules = ["StatefulRWKV5Block"]  # noqa: RUF012
    layers_name = "blocks"
    norm_name = "ln_out"
    blocks: nn.ModuleList

    def make_layer(self, config: StatefulRWKV5Config, layer: int) -> StatefulRWKV5Block:
        mixings = StatefulRWKV5TimeMixing(config, layer), StatefulRWKV5ChannelMixing(config, layer)
        norm = partial(nn.LayerNorm, config.hidden_size, config.layer_norm_epsilon)
        return StatefulRWKV5Block(norm, layer == 0, *mixings)

    def make_norm(self, config: StatefulRWKV5Config) -> nn.Module:
        return nn.LayerNorm(config.hidden_size)  # official code: 1e-5, whatever layer_norm_epsilon

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.blocks


class StatefulRWKV5ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulRWKV5Model
    head_name = "head"
