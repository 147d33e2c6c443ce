"""Configuration of HGRN-2 with an initial and a final state."""

from .configuration_fla import FlaConfigMixin
from .configuration_stateful import PreTrainedConfig


class StatefulHGRN2Config(FlaConfigMixin, PreTrainedConfig):
    """Fields of fla's `HGRN2Config`, of `FlaConfigMixin`, and:

    Args:
        num_heads: Heads; None for hidden_size / expand_ratio.
        expand_ratio: State dim N of each head, also its value dim; None for hidden_size / num_heads.
        use_short_conv: Whether causal convolutions without activation follow the three projections.
        conv_size: Their taps K.
        use_lower_bound: Whether the forget gates of later layers have learned lower bounds.
        elementwise_affine: Whether the norm of the outputs has a weight.
    """

    model_type = "stateful_hgrn2"
    display_name = "HGRN-2"
    hub_tags = ("linear-attention",)
    upstream_types = ("hgrn2",)
    layouts = ("fla",)
    tiny = {"expand_ratio": 16}  # noqa: RUF012
    lora_target_modules = ("q_proj", "f_proj", "i_proj", "o_proj")

    num_heads: int | None = None  # type: ignore[assignment]
    expand_ratio: int | None = 128
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True
    elementwise_affine: bool = True

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Of one layer: number of heads and the size of each."""
        if self.layer_num_heads is not None:
            heads = self.layer_num_heads[layer]
        else:
            heads = self.num_heads or self.hidden_size // self.expand_ratio  # type: ignore[operator]
        return heads, self.hidden_size // heads

    def check(self) -> None:
        """See `FlaConfigMixin.check`; also sizes that do not go together."""
        super().check()
        self.check_heads("expand_ratio")
