"""What RWKV-5, RWKV-6 and RWKV-7 share: token shifts, low-rank maps, the norm of heads, the state of time mixing.

The block and the backbone are those of RWKV-6 and RWKV-7, on the parameter names of fla.

The conv part of the state is (B, 2D, 1): the last normed input of time mixing, below it that of channel mixing.
Shapes: B batch, T tokens, D hidden size, H heads, N key dim, P value dim.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import initialization as init

from .layers_mixer import MixerLayer, ScanMixer
from .modeling_stateful import StatefulBackbone
from .rows import Rows
from .rows_moved import inputs_around, over_groups
from .state_value import LayerShape, LayerState


def token_shift(x: Tensor, initial_state: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
    """The input before each token, x_{t-1} (arXiv:2404.05892, section 3.1), and the last real input.

    Args:
        x: Inputs, (B, T, D).
        initial_state: The input before the first token, (B, D, 1).
        rows: As layers get them (`Rows`).
    """
    before, after = inputs_around([x], initial_state, rows)
    return torch.cat([before.mT.to(x.dtype), x[:, :-1]], dim=1), after


class LowRank(nn.Module):
    """`bias + up(activation(down(x)))`."""

    def __init__(self, size: int, rank: int, output: int, activation: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(size, rank, bias=False), activation, nn.Linear(rank, output, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)

    @property
    def bias(self) -> Tensor:
        """(output,); None without one."""
        return self.lora[2].bias  # type: ignore[return-value]

    @torch.no_grad()
    def initialize(self) -> None:
        """As fla does: the result is the bias, which is zero. A time mixing calls it after its linear maps."""
        init.zeros_(self.get_parameter("lora.0.weight"))
        up = self.get_parameter("lora.2.weight")
        init.orthogonal_(up, gain=0.1 * max(1.0, math.sqrt(up.shape[1] / up.shape[0])))
        if self.bias is not None:
            init.zeros_(self.bias)


class HeadNorm(nn.Module):
    """Layer norm of each head's outputs, (B, T, H, P) to (B, T, H*P); a group norm on names and sizes."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, y: Tensor) -> Tensor:
        return layer_norm(y, y.shape[-1:], eps=self.eps).flatten(2) * self.weight + self.bias

    def init_weights(self) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)


class RWKVTimeMixing(ScanMixer):
    """Base of time mixings; a subclass sets `heads`, `key_dim` and `value_dim`, and what a `ScanMixer` names."""

    convolves = False
    heads: int
    key_dim: int
    value_dim: int

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N) and (2*D, 1): `conv_parts`."""
        return LayerShape((self.heads, self.value_dim, self.key_dim), (2 * self.config.hidden_size, 1))

    @property
    def conv_parts(self) -> dict[str, int]:
        """The last inputs of this mixer and of the channel mixing after it."""
        return dict.fromkeys(("time mixing", "channel mixing"), self.config.hidden_size)


def layer_norm_of(config: Any) -> nn.LayerNorm:
    """Each norm of RWKV-6 and RWKV-7 but that of the heads."""
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class RWKVBlock(MixerLayer):
    """Pre-norm residual blocks of time mixing and channel mixing, whose modules have the `names` of a checkpoint."""

    mixer_name = "attn"
    names: ClassVar[tuple[str, ...]] = ("pre_norm", "attn_norm", "attn", "ffn_norm", "ffn")  # by their use
    stored: ClassVar[tuple[str, ...]] = names  # in that of the parameters

    def __init__(self, norm: Callable[[], nn.Module], first: bool, attn: RWKVTimeMixing, ffn: nn.Module) -> None:
        """`first`: whether hidden states are normed before all else."""
        super().__init__()
        modules = norm() if first else nn.Identity(), norm(), attn, norm(), ffn
        for name in self.stored:
            self.add_module(name, modules[self.names.index(name)])

    @over_groups
    def forward(
        self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None, *inputs: Tensor
    ) -> tuple[Any, ...]:
        """See `StatefulBackbone`; what the time mixing takes and gives beyond that goes through."""
        pre_norm, attn_norm, attn, ffn_norm, ffn = [getattr(self, name) for name in self.names]
        attn_shift, ffn_shift = state.conv.chunk(2, dim=1)
        hidden_states = pre_norm(hidden_states)
        output, state, *further = attn(attn_norm(hidden_states), state._replace(conv=attn_shift), rows, *inputs)
        hidden_states = hidden_states + output
        output, ffn_shift = ffn(ffn_norm(hidden_states), ffn_shift, rows)
        return hidden_states + output, state._replace(conv=torch.cat([state.conv, ffn_shift], dim=1)), *further


class RWKVBackbone(StatefulBackbone):
    """The backbone of RWKV-6 and RWKV-7. A family sets `config_class` and its mixings."""

    base_model_prefix = "model"
    _no_split_modules = ["RWKVBlock"]  # noqa: RUF012
    time_mixing: Callable[[Any, int], RWKVTimeMixing]
    channel_mixing: Callable[[Any, int], nn.Module]

    def make_layer(self, config: Any, layer: int) -> RWKVBlock:
        mixings = self.time_mixing(config, layer), self.channel_mixing(config, layer)
        return RWKVBlock(partial(layer_norm_of, config), config.norm_first and layer == 0, *mixings)

    def make_norm(self, config: Any) -> nn.Module:
        return layer_norm_of(config)
