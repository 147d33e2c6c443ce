"""Configuration of RWKV-5 with an initial and a final state."""

from .configuration_stateful import PreTrainedConfig, StatefulConfigMixin


class StatefulRWKV5Config(StatefulConfigMixin, PreTrainedConfig):
    """Fields of the official RWKV-5 checkpoints for Transformers, and of `StatefulConfigMixin`.

    Args:
        hidden_size: Width D of the residual stream.
        attention_hidden_size: Width A of time mixing; None for D.
        head_size: Keys and values of each head, N = P.
        layer_num_heads: Heads of each layer, where they differ (StateX, Shen et al. 2025), of A / heads channels each;
            None for `head_size` in all.
        num_attention_heads: A / head_size, or head_size as in early official files. It changes nothing.
        head_size_divisor: Outputs are divided by it before the norm of each head, which is an epsilon of
            1e-5 * head_size_divisor**2. Official code before March 2024 lacks this division of the training code.
        intermediate_size: Width of channel mixing; None for 3.5 * D, rounded down to a multiple of 32.
        layer_norm_epsilon: Added to the variances of the norms before time and channel mixing and of pre_ln. The
            norm of each head and the last one have 1e-5 of their own, as in the official code.
        rescale_every: Without effect. Official code halves half-precision activations every so many layers, which
            changes results by rounding only.
        initializer_range: Standard deviation of initial weights.
    """

    model_type = "stateful_rwkv5"
    display_name = "RWKV-5"
    hub_tags = ("rwkv",)
    forgets_by = ("retention", "decay_scale")
    upstream_types = ("rwkv5",)
    layouts = ("rwkv-hf", "rwkv")
    tiny = {"head_size": 32}  # noqa: RUF012
    lora_target_modules = tuple(f"attention.{name}" for name in ("key", "value", "receptance", "gate", "output"))

    vocab_size: int = 65536
    hidden_size: int = 768
    num_hidden_layers: int = 24
    attention_hidden_size: int | None = None
    head_size: int = 64
    layer_num_heads: list[int] | None = None
    num_attention_heads: int | None = None
    head_size_divisor: int = 8
    intermediate_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    rescale_every: int = 6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False

    @property
    def inner_size(self) -> int:
        """Width A of time mixing."""
        return self.attention_hidden_size or self.hidden_size

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Of one layer: heads H and the size of each, N = P."""
        heads = self.inner_size // self.head_size if self.layer_num_heads is None else self.layer_num_heads[layer]
        return heads, self.inner_size // heads

    def check(self) -> None:
        """See `StatefulConfigMixin.check`; also sizes that do not go together."""
        super().check()
        self.part("attention_hidden_size", self.inner_size, self.head_size)
        for heads in self.layer_num_heads or ():
            self.part("attention_hidden_size", self.inner_size, heads)
