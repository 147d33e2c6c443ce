"""The models of the study: a decoder-only Transformer that differs in its position encoding alone, numbers as outputs.

arXiv:2506.11769, section 3 and appendix A, compares no position
encoding (NoPE, the default), learned positions, RoPE and ALiBi. The classes of Transformers that have these (GPT-2,
Llama, BLOOM) differ in norms and feed-forward layers, too, and none has no positions: so one network of our own, in
which only this changes.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

Positions = Literal["none", "learned", "rope", "alibi"]
POSITIONS: tuple[Positions, ...] = get_args(Positions)
_ROPE_BASE = 10_000.0


class DecoderTransformer(nn.Module):
    """Pre-norm blocks of causal attention and a feed-forward layer four times as wide.

    Args:
        vocab_size: Number of token ids.
        positions: "none", "learned" (a vector added to each embedding), "rope" (Su et al., arXiv:2104.09864) or
            "alibi" (Press et al., arXiv:2108.12409).
        hidden_size: D.
        num_layers: Number of blocks.
        num_heads: H; D / H is even.
        max_length: With learned positions, the most tokens of a row; not used otherwise.

    Raises:
        ValueError: for other positions, and a hidden size that heads cannot share.
    """

    def __init__(
        self,
        vocab_size: int,
        positions: Positions = "none",
        hidden_size: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        max_length: int = 64,
    ) -> None:
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"positions is {positions!r}, but must be one of {POSITIONS}.")
        if hidden_size % (2 * num_heads):
            raise ValueError(f"hidden_size {hidden_size} must be a multiple of 2 x {num_heads} heads.")
        self.hidden_size, self.positions, self.max_length = hidden_size, positions, max_length
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        if positions == "learned":
            self.position_embeddings = nn.Embedding(max_length, hidden_size)
        self.layers = nn.ModuleList(_Block(hidden_size, num_heads, positions) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.apply(_initialize)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        """Hidden states (B, T, D) as `last_hidden_state`.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), padding on the right only, which no real token sees.

        Raises:
            ValueError: for more tokens than there are learned positions, and padding that is not on the right.
        """
        if attention_mask is not None:
            check_right_padding(attention_mask)
        length = input_ids.shape[1]
        hidden_states = self.embeddings(input_ids)
        if self.positions == "learned":
            if length > self.max_length:
                raise ValueError(f"A row has {length} tokens, but there are {self.max_length} learned positions.")
            hidden_states = hidden_states + self.position_embeddings.weight[:length]
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class _Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, positions: Positions) -> None:
        super().__init__()
        self.num_heads, self.positions = num_heads, positions
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self._attention(self.attention_norm(hidden_states))
        mixed: Tensor = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return mixed

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        heads = self.in_proj(x).view(batch, length, 3, self.num_heads, size // self.num_heads)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        if self.positions == "rope":
            queries, keys = rotate(queries), rotate(keys)
        bias = alibi_bias(self.num_heads, length, x) if self.positions == "alibi" else None
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, bias, is_causal=bias is None)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, length, size))
        return out


def check_right_padding(attention_mask: Tensor) -> None:
    """Raise a `ValueError` for a mask (B, T) whose rows are not ones, at least one, and then zeros."""
    ones = attention_mask.cumprod(1).sum(1)
    if bool((ones != attention_mask.sum(1)).any() | (ones < 1).any()):
        raise ValueError("attention_mask must have ones, at least one, and then zeros in each row: pad on the right.")


def rotate(x: Tensor) -> Tensor:
    """RoPE (arXiv:2104.09864, Eq. 15) of (..., T, D): pairs (i, i + D/2) at t are turned by t * 10000^(-2i/D)."""
    length, size = x.shape[-2:]
    exact = torch.promote_types(x.dtype, torch.float32)  # bfloat16 has no odd numbers above 256
    places = torch.arange(length, device=x.device, dtype=exact)[:, None]
    angles = places * _ROPE_BASE ** (-torch.arange(0, size, 2, device=x.device, dtype=exact) / size)  # (T, D / 2)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def alibi_bias(num_heads: int, length: int, like: Tensor) -> Tensor:
    """ALiBi (arXiv:2108.12409, section 3), (H, T, T): -2^(-8 (h + 1) / H) times the distance for head h."""
    places = torch.arange(length, device=like.device)
    distance = (places[:, None] - places).to(like.dtype)
    slopes = 2.0 ** (-8 / num_heads * torch.arange(1, num_heads + 1, device=like.device, dtype=like.dtype))
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


@dataclass
class ScalarOutput(ModelOutput):
    """Output of `ScalarRegression`.

    Attributes:
        loss: Mean squared error, if labels were given.
        logits: Predictions (B,).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None


class ScalarRegression(nn.Module):
    """A feed-forward network on the hidden state of the last token ("Output Alignment", appendix A). Trainer takes it.

    Args:
        backbone: takes `input_ids` (B, T) and `attention_mask` (B, T) and returns `last_hidden_state` (B, T, D): a
            `DecoderTransformer`, the backbone of a stateful family, such as `StatefulMamba2Model`, or one of
            Transformers.
        hidden_size: D.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, 1))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> ScalarOutput:
        """Predict one number for each row.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 at real tokens and 0 at padding, which stands on the right; None for no padding.
            labels: (B,), the numbers.

        Raises:
            ValueError: for padding that is not on the right.
        """
        if attention_mask is not None:
            check_right_padding(attention_mask)
        padded: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        hidden_states = self.backbone(input_ids=input_ids, **padded).last_hidden_state
        rows = torch.arange(len(input_ids), device=input_ids.device)
        last = -1 if attention_mask is None else attention_mask.sum(1) - 1
        predictions = self.head(hidden_states[rows, last]).squeeze(-1)
        loss = None if labels is None else nn.functional.mse_loss(predictions, labels.to(predictions.dtype))
        return ScalarOutput(loss=loss, logits=predictions)
