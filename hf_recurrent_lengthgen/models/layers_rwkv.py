"""What RWKV-5 and RWKV-6 share: token shifts, the norm of heads, and the state of time mixing.

The conv part of the state is (B, 2D, 1): the last normed input of time mixing, below it that of channel mixing.
Shapes: B batch, T tokens, D hidden size, H heads, N key dim, P value dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import initialization as init

from .forgetting_gated import GatedRecurrence
from .padding import last_inputs
from .recurrent_state import LayerShape
from .scan_mixer import ScanMixer
from .scan_rwkv6 import chunk_rwkv6, scan_rwkv6


def token_shift(x: Tensor, initial_state: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The input before each token, x_{t-1} (arXiv:2404.05892, section 3.1), and the last real input.

    Args:
        x: Inputs, (B, T, D).
        initial_state: The input before the first token, (B, D, 1).
        lengths: Number of real tokens in each row, (B,); None if all T are real.
    """
    return torch.cat([initial_state.mT.to(x.dtype), x[:, :-1]], dim=1), last_inputs(x, initial_state, lengths)


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
    """Base of time mixings; a subclass sets `heads`, `key_dim` and `value_dim`."""

    scan = staticmethod(scan_rwkv6)
    recurrence = GatedRecurrence
    grows = "num_heads"
    convolves = False
    heads: int
    key_dim: int
    value_dim: int

    def __init__(self, config: Any) -> None:
        super().__init__(config, chunk_rwkv6 is not None)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N) and (2*D, 1): `conv_parts`."""
        return LayerShape((self.heads, self.value_dim, self.key_dim), (2 * self.config.hidden_size, 1))

    @property
    def conv_parts(self) -> dict[str, int]:
        """The last inputs of this mixer and of the channel mixing after it."""
        return dict.fromkeys(("time mixing", "channel mixing"), self.config.hidden_size)
