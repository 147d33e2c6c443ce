"""What the configurations of the Mamba families share: initialization, sizes of layers, attention in some layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .configuration_stateful import StatefulConfigMixin, optional_module


@dataclass(init=False, repr=False, eq=False)
class ReferenceLayersConfigMixin(StatefulConfigMixin):
    """Fields that Transformers lacks: attention in place of some mixers, and per-layer sizes.

    In Figures 2, 4 and 5 of Trockman et al. (2024, arXiv:2410.11135), layer 4 of 8 is one head of softmax attention
    (`attention_layers=[3]`), or of linear attention with a head dim of 8, 32 or 1024 (`attention_kind="linear",
    attention_head_dim=32`).

    Args:
        attention_layers: Layers, counted from 0, with one head of causal attention in place of the mixer; None for
            none. No positions are encoded: the recurrent layers before it can do that.
        attention_kind: "softmax", or "linear" for y_t = sum_{j <= t} (q_t . k_j) v_j / sqrt(head dim) without feature
            map or normalizer. A model with softmax attention reads whole sequences only: it has no state of fixed
            size to give, carry or cache.
        attention_head_dim: Width of queries and keys, and of the values of softmax attention; values of linear
            attention have `hidden_size` channels. None means `hidden_size` for softmax and `state_size` for linear
            attention.
        layer_state_sizes: State dim N of each layer, where they differ (StateX, Shen et al. 2025); None for
            `state_size` in all.
        initialization: How new weights are drawn. "transformers": as by Transformers' own classes. "mamba-ssm": as by
            the authors' package. Linear layers and convolutions are then drawn as torch draws them, with a bias of the
            convolution; rates of Mamba-2 are A ~ U(1, 16); output projections are divided by the root of the number of
            layers (`rescale_prenorm_residual` becomes True); `initializer_range`, by default 0.02, is for embeddings.
            "transformers" has A = 1 to H, no such bias, and draws embeddings and linear layers with
            `initializer_range`, by default 0.1, which makes rows of B and C eight times larger at a width of 2048.
    """

    choices: ClassVar[dict[str, tuple[Any, ...]]] = StatefulConfigMixin.choices | {
        **{"initialization": ("transformers", "mamba-ssm"), "attention_kind": ("softmax", "linear")},
        "hidden_act": ("silu", "swish"),
    }

    attention_layers: list[int] | None = None
    attention_kind: str = "softmax"
    attention_head_dim: int | None = None
    layer_state_sizes: list[int] | None = None
    initialization: str = "transformers"

    def state_size_of(self, layer: int) -> int:
        """State dim N of one layer."""
        sizes = self.layer_state_sizes
        return self.state_size if sizes is None else sizes[layer]  # type: ignore[attr-defined]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.initialization == "mamba-ssm":
            self.rescale_prenorm_residual: bool = True
            if self.initializer_range == type(self).initializer_range:  # type: ignore[misc]
                self.initializer_range: float = 0.02

    def check(self) -> None:
        """See `StatefulConfigMixin.check`; also the layers with attention."""
        super().check()
        chosen: list[int] = list(self.attention_layers or ())
        layers: int = self.num_hidden_layers  # type: ignore[attr-defined]
        if not set(chosen) <= set(range(layers)) or len(set(chosen)) < len(chosen):
            raise ValueError(
                f"attention_layers must be None or different numbers from 0 to {layers - 1}, "
                f"got {self.attention_layers}."
            )
        if not chosen and (self.attention_kind != "softmax" or self.attention_head_dim is not None):
            raise ValueError(
                "attention_kind and attention_head_dim do nothing without attention_layers: set attention_layers, too."
            )

    def check_forgetting(self) -> None:
        """See `StatefulConfigMixin.check_forgetting`; refused with attention layers, which keep all tokens."""
        super().check_forgetting()
        rule = self.attention_layers and self.forgetting and optional_module("scan_forgetting").Forgetting.of(self)
        if rule and rule.changed():
            raise ValueError(
                f"forgetting changes Mamba layers only, and the layers {self.attention_layers} (attention_layers) "
                "would go on keeping all tokens: leave forgetting out."
            )
