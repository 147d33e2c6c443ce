"""Configuration fields that the families of flash-linear-attention (fla) share, under fla's names."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .configuration_stateful import PreTrainedConfig, StatefulConfigMixin

KEYS_CHANGE_ALL = "every key changes what earlier tokens wrote, so that a state is no sum of decayed writes"
"""Why families of the delta rule have no window."""


@dataclass(init=False, repr=False, eq=False)
class FlaConfigMixin(StatefulConfigMixin):
    """Fields of every fla family, added to `StatefulConfigMixin`; defaults as in fla 0.6.

    Args:
        hidden_size: Width D of the residual stream.
        num_hidden_layers: Number of layers.
        num_heads: Heads H of each layer.
        layer_num_heads: Heads of each layer, where they differ (StateX, Shen et al. 2025); None
            for `num_heads` in all.
        hidden_ratio: Width of the channel mixing over D, where `intermediate_size` is None.
        intermediate_size: Width of the channel mixing.
        hidden_act: Activation of the channel mixing; each family has one.
        norm_eps: Added to mean squares and variances.
        initializer_range: Standard deviation of initial weights.

    Token ids are None by default. What fla has in addition to the recurrence is refused: attention layers (`attn`),
    attention residuals (`attnres_block_size`), but in RWKV-7 an extra loss (`use_l2warp`). fla's flags that choose an
    implementation (`attn_mode`, `fuse_*`, `use_gk`, `use_gv`) stay and change nothing, except that GLA derives
    a parameter name from `fuse_norm`.
    """

    forgets_by: ClassVar[tuple[str, ...]] = ("retention", "decay_scale")
    choices: ClassVar[dict[str, tuple[Any, ...]]] = StatefulConfigMixin.choices | {
        **{"attn": (None,), "attnres_block_size": (None,), "use_l2warp": (False,)},
        "hidden_act": ("swish", "silu"),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 4
    layer_num_heads: list[int] | None = None
    hidden_ratio: int | float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    fuse_norm: bool = True
    attn: dict[str, Any] | None = None
    use_l2warp: bool = False
    attnres_block_size: int | None = None

    def check_heads(self, name: str) -> None:
        """Refuse heads that cannot share the width: `num_heads` of the size `name`, one of which may be None."""
        fields = {"num_heads": self.num_heads, name: getattr(self, name)}
        sizes = [size for size in fields.values() if size is not None]
        fits = sizes and (len(sizes) == 1 or sizes[0] * sizes[1] == self.hidden_size)
        if not fits or min(sizes) < 1 or self.hidden_size % sizes[0]:
            raise ValueError(f"num_heads * {name} must be hidden_size ({self.hidden_size}), got {fields}.")
        for count in self.layer_num_heads or ():
            self.part("hidden_size", self.hidden_size, count)

    def exclude(self, name: str) -> None:
        """Refuse a number of heads of all layers with `layer_num_heads`."""
        heads, of_all = self.layer_num_heads, getattr(self, name)
        if heads is not None and of_all is not None:
            raise ValueError(
                f"layer_num_heads and {name} exclude each other, got {heads} and {of_all}: leave one of them None."
            )


class ExpandedHeadsConfig(FlaConfigMixin, PreTrainedConfig):
    """What GLA, linear attention and RWKV-6 share: sizes of keys and values.

    Args:
        expand_k: Width of all keys over D.
        expand_v: Width of all values over D.
    """

    expand_k: int | float = 1.0
    expand_v: int | float = 1.0

    def check(self) -> None:
        super().check()
        for count in {*(self.layer_num_heads or ()), self.num_heads}:
            self.part("expand_k * hidden_size", self.expand_k * self.hidden_size, count)
            self.part("expand_v * hidden_size", self.expand_v * self.hidden_size, count)

    def heads_of(self, layer: int) -> tuple[int, int, int]:
        """Of one layer: heads H, key dim N, value dim P."""
        heads = self.layer_num_heads[layer] if self.layer_num_heads is not None else self.num_heads
        return heads, int(self.expand_k * self.hidden_size) // heads, int(self.expand_v * self.hidden_size) // heads


class GatedLinearAttentionConfig(ExpandedHeadsConfig):
    """What GLA and linear attention share: several heads per key.

    Args:
        num_kv_heads: Heads of keys and values; None for as many as queries.
        elementwise_affine: Whether the norm of the outputs has a weight.
    """

    num_kv_heads: int | None = None
    elementwise_affine: bool = True

    def check(self) -> None:
        super().check()
        self.exclude("num_kv_heads")
        if self.num_kv_heads is not None:
            self.part("num_heads", self.num_heads, self.num_kv_heads)


class DeltaRuleConfig(FlaConfigMixin, PreTrainedConfig):
    """Fields of `FlaConfigMixin`, and:

    Args:
        expand_v: Width of values over that of keys.
        use_short_conv: Whether causal convolutions follow the projections to q, k and v.
        conv_size: Their taps K.
        allow_neg_eigval: Whether the rate beta of the rule goes up to 2 instead of 1, so that transitions have
            negative eigenvalues (Grazzi et al. 2025, arXiv:2411.12537).
    """

    why_not_forget = KEYS_CHANGE_ALL

    expand_v: int | float = 1.0
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False


class HeadDimConfig(DeltaRuleConfig):
    """Fields of `DeltaRuleConfig`, and:

    Args:
        num_heads: Heads of queries and keys.
        num_v_heads: Heads of values, states, decays and rates, a multiple of `num_heads`; None for as many.
        head_dim: Key dim N of each head; its value dim P is `expand_v` times that.
    """

    num_v_heads: int | None = None
    head_dim: int = 128

    def check(self) -> None:
        super().check()
        width = self.part("expand_v * head_dim", self.expand_v * self.head_dim, 1)
        if self.num_v_heads is not None:
            self.part("num_v_heads", self.num_v_heads, self.num_heads)
        self.exclude("num_v_heads")
        for count in self.layer_num_heads or ():
            self.part("num_heads * head_dim", self.num_heads * self.head_dim, count)
            self.part("num_heads * head_dim * expand_v", self.num_heads * width, count)

    def heads_of(self, layer: int) -> tuple[int, int, int, int]:
        """Of one layer: heads of keys, heads of values H, key dim N, value dim P."""
        heads, N, P = self.num_heads, self.head_dim, int(self.expand_v * self.head_dim)
        if self.layer_num_heads is None:
            return heads, self.num_v_heads or heads, N, P
        merged = self.layer_num_heads[layer]
        return merged, merged, heads * N // merged, heads * P // merged
