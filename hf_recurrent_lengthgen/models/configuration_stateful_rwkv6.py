"""Configuration of RWKV-6 with an initial and a final state."""

from typing import ClassVar

from transformers import PreTrainedConfig

from .configuration_fla import FlaConfigMixin
from .configuration_stateful import StatefulConfigMixin as StatefulConfigMixin
from .forgetting import Forgetting as Forgetting


class StatefulRWKV6Config(FlaConfigMixin, PreTrainedConfig):
    """Fields of fla's `RWKV6Config`, of `FlaConfigMixin`, and:

    Args:
        expand_k: Width of all keys over D.
        expand_v: Width of all values over D.
        proj_low_rank_dim: Rank of the five data-dependent token shifts.
        gate_low_rank_dim: Rank of the data-dependent decay.
        norm_first: Whether the first layer norms the embeddings (`pre_norm`), and goes on from the result.
        norm_bias: Whether layer norms have a bias.
        group_norm_eps: Epsilon of the norm of each head's outputs; None for `norm_eps`, as in fla. Official weights
            were trained with 1e-5 * 8**2 = 6.4e-4.
    """

    model_type = "stateful_rwkv6"
    upstream_types: ClassVar[tuple[str, ...]] = ("rwkv6",)
    lora_target_modules: ClassVar[tuple[str, ...]] = (
        "r_proj.linear",
        "k_proj.linear",
        "v_proj.linear",
        "g_proj.linear",
        "o_proj",
    )
    activations: ClassVar[tuple[str, ...]] = ("sqrelu",)

    expand_k: int | float = 0.5
    expand_v: int | float = 1.0
    hidden_ratio: int | float | None = 3.5
    hidden_act: str = "sqrelu"
    proj_low_rank_dim: int = 32
    gate_low_rank_dim: int = 64
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    group_norm_eps: float | None = None

    def check(self) -> None:
        """See `FlaConfigMixin.check`; also sizes that do not go together."""
        super().check()
        for count in {*(self.layer_num_heads or ()), self.num_heads}:
            self.parts("expand_k * hidden_size", self.expand_k * self.hidden_size, count)
            self.parts("expand_v * hidden_size", self.expand_v * self.hidden_size, count)

    def heads_of(self, layer: int) -> tuple[int, int, int]:
        """Of one layer: heads H, key dim N, value dim P."""
        heads = self.num_heads if self.layer_num_heads is None else self.layer_num_heads[layer]
        return heads, int(self.expand_k * self.hidden_size) // heads, int(self.expand_v * self.hidden_size) // heads


StatefulRWKV6Config.register_for_auto_class()
