"""Configuration fields that DeltaNet, Gated DeltaNet and Kimi Delta Attention share, under fla's names."""

from .configuration_fla import KEYS_CHANGE_ALL, FlaConfigMixin
from .configuration_stateful import PreTrainedConfig


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
        if self.num_v_heads is not None and (self.num_v_heads < 1 or self.num_v_heads % self.num_heads):
            raise ValueError(f"num_v_heads must be a multiple of {self.num_heads} heads, got {self.num_v_heads}.")
        width = self.expand_v * self.head_dim
        if width < 1 or width != int(width):
            raise ValueError(f"expand_v * head_dim must be an integer above 0, got {width:g}.")
        self.exclude("num_v_heads")
        for count in self.layer_num_heads or ():
            self.parts("num_heads * head_dim", self.num_heads * self.head_dim, count)
            self.parts("num_heads * head_dim * expand_v", self.num_heads * width, count)

    def heads_of(self, layer: int) -> tuple[int, int, int, int]:
        """Of one layer: heads of keys, heads of values H, key dim N, value dim P."""
        heads, N, P = self.num_heads, self.head_dim, int(self.expand_v * self.head_dim)
        if self.layer_num_heads is None:
            return heads, self.num_v_heads or heads, N, P
        merged = self.layer_num_heads[layer]
        return merged, merged, heads * N // merged, heads * P // merged
