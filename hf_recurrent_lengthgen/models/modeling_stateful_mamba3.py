"""Mamba-3 (SISO) with a state as argument and result, on the parameter names of mamba-ssm and fla.

Glossary (Lahoti et al. 2026, arXiv:2603.15569 -> here): Delta -> dt, A -> -rates, lambda -> share, theta -> the angles
dt * w, h -> state.recurrent, heads H of P channels, N state_size, G n_groups.

Different from both: the state is a plain value, in two parts. The recurrent part is h in the frame of the last token
(scan_trapezoid.py), without a sum of angles, which no noise or average would suit. The conv part holds x and B of the
last token, whose second write (trapezoidal rule) the next step size decides; B is normed, and without its bias. The
mixer takes right-padded rows, and computes the recurrence in full precision (the kernel in its own).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import initialization as init

from .configuration_stateful_mamba3 import StatefulMamba3Config
from .layers_mamba import MixerBackbone, MixerBlock, init_output, init_steps
from .layers_mixer import RMSNorm, ScanMixer, rms_normalize
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import inputs_around, over_groups, zero_past_end
from .scan_backends import repeat_heads
from .scan_trapezoid import chunk_simple_gla, scan_trapezoid
from .state_value import LayerShape, LayerState


class GatedHeadNorm(nn.Module):
    """`weight * y / rms(y) * silu(gate)` with the statistics of each head, (B, T, H, P) to (B, T, H*P)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        return rms_normalize(y, self.eps).flatten(2) * self.weight * silu(gate)


class GatedMLP(nn.Module):
    """`fc2(y * silu(gate))` with `fc1(x)` = [y, gate]."""

    def __init__(self, config: StatefulMamba3Config, size: int) -> None:
        super().__init__()
        self.config = config
        self.fc1 = nn.Linear(config.hidden_size, 2 * size, bias=False)
        self.fc2 = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.fc1(x).chunk(2, -1)
        return self.fc2(y * silu(gate))

    def init_weights(self) -> None:
        init_output(self.fc2, self.config)


class StatefulMamba3Mixer(ScanMixer):
    """Projections, norms and biases of B and C, recurrence, gate.

    Parameters are named and laid out as in mamba-ssm: `in_proj` rows are [z, x, B, C, dt, A, lambda, angles].
    """

    scan = staticmethod(scan_trapezoid)
    why_not_grow = "B and C are normed over all keys of a head, and angles turn a share of them"
    convolves = False

    def __init__(self, config: StatefulMamba3Config, layer: int) -> None:
        super().__init__(config, chunk_simple_gla is not None)
        assert config.num_heads is not None
        H, N = config.num_heads, config.state_size
        inner, bc = H * config.head_dim, config.n_groups * N
        self.sizes = [inner, inner, bc, bc, H, H, H, config.num_angles]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.use_bias)
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.B_bias = nn.Parameter(torch.empty(H, 1, N))
        self.C_bias = nn.Parameter(torch.empty(H, 1, N))
        self.B_norm = RMSNorm(N, config.norm_eps)
        self.C_norm = RMSNorm(N, config.norm_eps)
        self.D = nn.Parameter(torch.empty(H))
        if config.is_outproj_norm:
            self.norm = GatedHeadNorm(inner, config.norm_eps)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N) and (H*P + G*N, 1)."""
        heads, values, keys = len(self.D), self.config.head_dim, self.config.state_size
        return LayerShape((heads, values, keys), (sum(self.conv_parts.values()), 1))

    @property
    def conv_parts(self) -> dict[str, int]:
        """x and B of the last token."""
        return {"x": self.sizes[1], "B": self.sizes[2]}

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        backend = self.backend_for(hidden_states)
        z, x, B, C, dt, rates, share, w = self.in_proj(hidden_states).split(self.sizes, -1)
        B, C = (
            norm(part.unflatten(-1, (-1, self.config.state_size)))
            for norm, part in ((self.B_norm, B), (self.C_norm, C))
        )
        before, after = inputs_around([x, B.flatten(2)], state.conv, rows)
        x, B = (
            torch.cat([first.mT.to(part.dtype), part], dim=1)
            for first, part in zip(before.split(self.sizes[1:3], dim=1), (x, B.flatten(2)), strict=True)
        )

        wide = state.recurrent.dtype
        heads = len(self.D)
        B, C = (
            repeat_heads(part.to(wide), heads) + bias[:, 0].to(wide)
            for part, bias in ((B.unflatten(-1, (-1, self.config.state_size)), self.B_bias), (C, self.C_bias))
        )
        dt = zero_past_end(softplus(dt.to(wide) + self.dt_bias.to(wide)), rows)
        g = -dt * self.decay_rates(rates.to(wide))
        w, share = math.pi * w.to(wide).tanh(), share.to(wide).sigmoid()
        x = x.unflatten(-1, (heads, -1))
        y, state = self.advance(dt, g, share, w, x, B, C, self.D.to(wide), state=state, rows=rows, backend=backend)
        z = z.to(wide)
        y = self.norm(y, z) if self.config.is_outproj_norm else y.flatten(2) * silu(z)
        return self.out_proj(y.to(hidden_states.dtype)), state._replace(conv=after)

    def decay_rates(self, x: Tensor) -> Tensor:
        """-A of its projection."""
        if self.config.decay_activation == "softplus":
            rates = softplus(x)
        else:
            rates = x.clamp(min=0) + 1 / (1 - x.clamp(max=0))
        return rates.clamp(min=self.config.A_floor)

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in mamba-ssm: biases of B and C are 1; see `init_steps` and `init_output`."""
        init.ones_(self.B_bias)
        init.ones_(self.C_bias)
        init_steps(self.D, self.dt_bias, self.config)
        init_output(self.out_proj, self.config)


class StatefulMamba3Block(MixerBlock):
    """`MixerBlock`, and `x + mlp(norm2(x))` where the config has an MLP."""

    def __init__(self, config: StatefulMamba3Config, layer: int) -> None:
        super().__init__(config, StatefulMamba3Mixer(config, layer))
        self.mlp = None
        if config.intermediate_size is not None:
            self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = GatedMLP(config, config.intermediate_size)

    @over_groups
    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        hidden_states, state = super().forward(hidden_states, state, rows)
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.norm2(hidden_states.to(self.norm2.weight.dtype)))
        return hidden_states, state


class StatefulMamba3Model(MixerBackbone):
    config_class = StatefulMamba3Config
    _no_split_modules = ["StatefulMamba3Block"]  # noqa: RUF012

    def make_layer(self, config: StatefulMamba3Config, layer: int) -> StatefulMamba3Block:
        return StatefulMamba3Block(config, layer)


class StatefulMamba3ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulMamba3Model
