"""What the layers of GLA, HGRN-2 and linear attention share, on the parameter names of fla.

Shapes: B batch, T tokens, D hidden size, H heads, N key dim, P value dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .configuration_fla import FlaConfigMixin
from .layers_mixer import MixerLayer, RMSNorm, ScanMixer
from .modeling_stateful import StatefulBackbone
from .rows import Rows
from .rows_moved import over_groups
from .scan_backends import ScanBackend
from .scan_fla_kernels import fla_kernel, fused
from .state_value import LayerState

swiglu = fla_kernel("fla.modules.activations.ops", "swiglu")
rms_norm_gated = fla_kernel("fla.modules.norm.fused_norm_gate", "rms_norm_gated")
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "swish": silu, "sigmoid": torch.sigmoid}


class HeadRMSNorm(RMSNorm):
    """`weight * y / rms(y) * activation(gate)` of each head, (B, T, H, P) and (B, T, H*P) to (B, T, H*P)."""

    def forward(self, y: Tensor, gate: Tensor | None, backend: ScanBackend, activation: str = "silu") -> Tensor:  # type: ignore[override]
        """Without a gate, only the norm."""
        if gate is not None and fused(rms_norm_gated, y, backend):
            gate = gate.unflatten(-1, y.shape[2:])
            return rms_norm_gated(y, gate, self.weight, None, activation, eps=self.eps).flatten(2)
        normed = super().forward(y).flatten(2)
        return normed if gate is None else normed * _GATES[activation](gate)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; without a width, it is rounded up to a multiple of 256."""

    def __init__(self, config: FlaConfigMixin) -> None:
        super().__init__()
        size = config.intermediate_size
        if size is None:
            size = -(-int(config.hidden_size * (config.hidden_ratio or 4) * 2 / 3) // 256) * 256
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, backend: ScanBackend = "torch") -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up) if fused(swiglu, x, backend) else silu(gate) * up)


class MixerMLPBlock(MixerLayer):
    """Pre-norm residual blocks of the recurrence (`attn`) and of channel mixing (`mlp`)."""

    mixer_name = "attn"

    def __init__(self, config: FlaConfigMixin, mixer: ScanMixer) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = mixer
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    @over_groups
    def forward(
        self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None, *inputs: Tensor
    ) -> tuple[Tensor, LayerState]:
        output, state = self.attn(self.attn_norm(hidden_states), state, rows, *inputs)
        hidden_states = hidden_states + output
        backend = self.attn.backend_for(hidden_states)
        return hidden_states + self.mlp(self.mlp_norm(hidden_states), backend), state


class MixerMLPBackbone(StatefulBackbone):
    """The backbone of families with these blocks. A family sets `config_class` and `mixer_class`."""

    base_model_prefix = "model"
    _no_split_modules = ["MixerMLPBlock"]  # noqa: RUF012
    mixer_class: Callable[[Any, int], ScanMixer]

    def make_layer(self, config: Any, layer: int) -> MixerMLPBlock:
        return MixerMLPBlock(config, self.mixer_class(config, layer))

    def make_norm(self, config: Any) -> nn.Module:
        return RMSNorm(config.hidden_size, config.norm_eps)
