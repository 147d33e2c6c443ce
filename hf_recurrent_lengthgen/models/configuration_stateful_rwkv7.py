"""Configuration of RWKV-7 with an initial and a final state."""

from .configuration_fla import KEYS_CHANGE_ALL, FlaConfigMixin
from .configuration_stateful import PreTrainedConfig


class StatefulRWKV7Config(FlaConfigMixin, PreTrainedConfig):
    """Fields of fla's `RWKV7Config`, of `FlaConfigMixin`, and:

    Args:
        num_heads: Heads; None for hidden_size / head_dim.
        head_dim: Keys N of each head; None for hidden_size / num_heads.
        value_dim: Width of all values, a multiple of hidden_size; None for hidden_size. A list has the width of each
            layer, which must be one: later layers mix the values of the first one into their own.
        decay_low_rank_dim: Rank of the data-dependent decay.
        gate_low_rank_dim: Rank of the output gate.
        a_low_rank_dim: Rank of the in-context learning rate.
        v_low_rank_dim: Rank of the share of the first layer's values in those of later layers.
        norm_first: Whether the first layer norms the embeddings (`pre_norm`), and goes on from the result.
        norm_bias: Whether layer norms have a bias.
        norm_eps: Added to the variances of layer norms.
        group_norm_eps: Added to the variances of the heads' outputs; None for `head_dim` times `norm_eps`, as in fla.
            The authors' code has 64e-5 for heads of any size.
        use_l2warp: Whether the loss for labels has L2Wrap, which keeps the largest logits small; fla has it unless
            set, this package only if set.
    """

    model_type = "stateful_rwkv7"
    display_name = "RWKV-7"
    hub_tags = ("rwkv",)
    upstream_types = ("rwkv7",)
    layouts = ("fla", "rwkv", "rwkv7-hf")
    tiny = {"head_dim": 32}  # noqa: RUF012
    lora_target_modules = ("r_proj", "k_proj", "v_proj", "o_proj")
    choices = FlaConfigMixin.choices | {"hidden_act": ("sqrelu",), "use_l2warp": (False, True)}
    why_not_forget = KEYS_CHANGE_ALL

    num_heads: int | None = None  # type: ignore[assignment]
    head_dim: int | None = 64
    value_dim: int | list[int] | None = None
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16
    hidden_act: str = "sqrelu"
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    group_norm_eps: float | None = None

    def heads_of(self, layer: int) -> tuple[int, int, int]:
        """Of one layer: heads H, key dim N, value dim P."""
        if self.layer_num_heads is not None:
            heads = self.layer_num_heads[layer]
        else:
            heads = self.num_heads or self.hidden_size // self.head_dim  # type: ignore[operator]
        return heads, self.hidden_size // heads, self._value_widths[0] // heads

    @property
    def _value_widths(self) -> list[int]:
        """Of each layer."""
        width = self.hidden_size if self.value_dim is None else self.value_dim
        return width if isinstance(width, list) else [width] * self.num_hidden_layers

    def check(self) -> None:
        """See `FlaConfigMixin.check`; also sizes that do not go together."""
        super().check()
        self.check_heads("head_dim")
        widths = self._value_widths
        if (
            len(widths) != self.num_hidden_layers
            or len(set(widths)) > 1
            or widths[0] < 1
            or widths[0] % self.hidden_size
        ):
            raise ValueError(
                f"value_dim must be a multiple of hidden_size ({self.hidden_size}), or a list of it for each of the "
                f"num_hidden_layers ({self.num_hidden_layers}) layers, got {self.value_dim}."
            )
