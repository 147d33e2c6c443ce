"""The pre-norm residual block of the Mamba families, and what their initializations share.

Shapes: B batch, T tokens, D hidden size.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .norms import RMSNorm
from .packed_rows import over_groups
from .recurrent_state import LayerState, state_dtype
from .scan_mixer import MixerLayer, ScanMixer


class MixerBlock(MixerLayer):
    """`x + mixer(norm(x))` on the parameter names of Transformers."""

    def __init__(self, config: Any, mixer: ScanMixer) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer

    @over_groups
    def forward(
        self, hidden_states: Tensor, state: LayerState, lengths: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """See `StatefulBackbone`."""
        normed = self.norm(hidden_states.to(self.norm.weight.dtype))
        residual = hidden_states.to(state_dtype(hidden_states.dtype)) if self.residual_in_fp32 else hidden_states
        output, state = self.mixer(normed, state, lengths)
        return residual + output, state


@torch.no_grad()
def init_mamba_mixer(mixer: Any, config: Any, steps: nn.Parameter) -> None:
    """What Transformers does alike in Mamba-1 and Mamba-2: D = 1, log-uniform steps, Kaiming weights.

    Args:
        mixer: With D, conv1d and out_proj.
        config: Its configuration.
        steps: The bias inside the softplus of the step sizes.
    """
    init.ones_(mixer.D)
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    dt = torch.rand(len(steps), device=steps.device, dtype=torch.float32) * (high - low) + low
    dt = dt.exp().clamp(min=config.time_step_floor)
    init.copy_(steps, dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
    init.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
    if mixer.conv1d.bias is not None:
        init.zeros_(mixer.conv1d.bias)
    init.kaiming_uniform_(mixer.out_proj.weight, a=math.sqrt(5))
    if config.rescale_prenorm_residual and not getattr(mixer.out_proj.weight, "_is_hf_initialized", False):
        mixer.out_proj.weight /= math.sqrt(config.num_hidden_layers)
