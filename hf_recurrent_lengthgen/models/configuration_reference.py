"""What the configurations of the Mamba families share: sizes of each layer, attention in some (arXiv:2410.11135)."""

from dataclasses import dataclass
from typing import ClassVar

from .configuration_stateful import StatefulConfigMixin
from .forgetting import Forgetting


@dataclass(init=False, repr=False, eq=False)
class ReferenceLayersConfigMixin(StatefulConfigMixin):
    """Fields beside those of Transformers: attention in the place of some mixers, and sizes of each layer.

    In Figures 2, 4 and 5 of arXiv:2410.11135, layer 4 of 8 is one head of softmax attention (`attention_layers=[3]`),
    or of linear attention with a head dim of 8, 32 or 1024 (`attention_kind="linear", attention_head_dim=32`).

    Args:
        attention_layers: Layers, counted from 0, with one head of causal attention in place of the mixer; None for
            none. No positions are encoded: the recurrent layers before it can do that.
        attention_kind: "softmax", or "linear" for y_t = sum_{j <= t} (q_t . k_j) v_j / sqrt(head dim) without feature
            map or normalizer. A model with softmax attention runs whole texts only: it has no state of fixed size that
            could be given, carried or cached.
        attention_head_dim: Width of queries and keys, in softmax attention of values, too; those of linear attention
            have `hidden_size` channels. None for `hidden_size` with softmax and `state_size` with linear attention.
        layer_state_sizes: State dim N of each layer, where they differ (post-training state expansion,
            arXiv:2509.22630); None for `state_size` in all.
    """

    attention_kinds: ClassVar[tuple[str, ...]] = ("softmax", "linear")

    attention_layers: list[int] | None = None
    attention_kind: str = "softmax"
    attention_head_dim: int | None = None
    layer_state_sizes: list[int] | None = None

    def state_size_of(self, layer: int) -> int:
        """State dim N of one layer."""
        sizes = self.layer_state_sizes
        return self.state_size if sizes is None else sizes[layer]  # type: ignore[attr-defined]

    def check(self) -> None:
        """See `StatefulConfigMixin.check`; also these fields, and the activation."""
        super().check()
        if (given := self.hidden_act) not in ("silu", "swish"):  # type: ignore[attr-defined]
            raise ValueError(f'hidden_act must be "silu", got {given!r}: the convolution is followed by SiLU.')
        chosen: list[int] = list(self.attention_layers or ())
        layers: int = self.num_hidden_layers  # type: ignore[attr-defined]
        if any(type(layer) is not int or layer not in range(layers) for layer in chosen) or (
            len(set(chosen)) < len(chosen)
        ):
            raise ValueError(
                f"attention_layers must be None or different numbers from 0 to {layers - 1}, "
                f"got {self.attention_layers}."
            )
        if self.attention_kind not in self.attention_kinds:
            raise ValueError(f"attention_kind must be one of {self.attention_kinds}, got {self.attention_kind!r}.")
        width = self.attention_head_dim
        if width is not None and (type(width) is not int or width < 1):
            raise ValueError(f"attention_head_dim must be None or at least 1, an integer, got {width!r}.")
        if not chosen and (self.attention_kind != "softmax" or self.attention_head_dim is not None):
            raise ValueError(
                "attention_kind and attention_head_dim do nothing without attention_layers: give the layers, too."
            )

    def check_forgetting(self) -> None:
        """See `StatefulConfigMixin.check_forgetting`; attention keeps all, so models with some are refused."""
        super().check_forgetting()
        if self.attention_layers and Forgetting.of(self) != Forgetting():
            raise ValueError(
                f"forgetting changes Mamba layers, and the layers {self.attention_layers} (attention_layers) are "
                "attention, which would go on keeping all tokens: leave it out."
            )
