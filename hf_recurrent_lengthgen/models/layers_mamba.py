"""What the Mamba families share: their block, their initialization and their backbone.

Shapes: B batch, T tokens, D hidden size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_stateful import optional_module
from .layers_mixer import MixerLayer, RMSNorm, ScanMixer
from .modeling_stateful import StatefulBackbone
from .rows import Rows
from .rows_moved import over_groups
from .state_value import LayerState, state_dtype


class MixerBlock(MixerLayer):
    """`x + mixer(norm(x))` on the parameter names of Transformers."""

    def __init__(self, config: Any, mixer: ScanMixer) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer

    @over_groups
    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        normed = self.norm(hidden_states.to(self.norm.weight.dtype))
        residual = hidden_states.to(state_dtype(hidden_states.dtype)) if self.residual_in_fp32 else hidden_states
        output, state = self.mixer(normed, state, rows)
        return residual + output, state


@torch.no_grad()
def init_mamba_mixer(mixer: Any, config: Any, steps: nn.Parameter) -> None:
    """What Mamba-1 and Mamba-2 share: see `init_steps` and `init_output`; no bias of convolutions in "transformers".

    Args:
        mixer: With D, conv1d and out_proj.
        config: Its configuration.
        steps: The bias inside the softplus of the step sizes.
    """
    init_steps(mixer.D, steps, config)
    init.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
    if mixer.conv1d.bias is not None and config.initialization == "mamba-ssm":
        init.uniform_(mixer.conv1d.bias, -(config.conv_kernel**-0.5), config.conv_kernel**-0.5)
    elif mixer.conv1d.bias is not None:
        init.zeros_(mixer.conv1d.bias)
    init_output(mixer.out_proj, config)


@torch.no_grad()
def init_steps(D: nn.Parameter, steps: nn.Parameter, config: Any) -> None:
    """D = 1, and log-uniform step sizes; `steps` is the bias inside their softplus."""
    init.ones_(D)
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    dt = torch.rand(len(steps), device=steps.device, dtype=torch.float32) * (high - low) + low
    dt = dt.exp().clamp(min=config.time_step_floor)
    init.copy_(steps, dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus


@torch.no_grad()
def init_output(linear: nn.Linear, config: Any) -> None:
    """Kaiming weights of a map to the residual stream, divided by the root of the number of layers if configured."""
    init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
    if config.rescale_prenorm_residual and not getattr(linear.weight, "_is_hf_initialized", False):
        linear.weight /= math.sqrt(config.num_hidden_layers)


class MixerBackbone(StatefulBackbone):
    """The backbone of the Mamba families, with attention in `config.attention_layers`.

    A family sets `config_class` and `mixer_class`.
    """

    _no_split_modules = ["MixerBlock"]  # noqa: RUF012
    norm_name = "norm_f"
    mixer_class: Callable[[Any, int], ScanMixer]

    def make_layer(self, config: Any, layer: int) -> MixerBlock:
        if layer not in (config.attention_layers or ()):
            return MixerBlock(config, self.mixer_class(config, layer))
        return MixerBlock(config, optional_module("layers_attention").attention_mixer(config))

    def make_norm(self, config: Any) -> nn.Module:
        return RMSNorm(config.hidden_size, config.layer_norm_epsilon)
