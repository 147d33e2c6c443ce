"""Configuration of linear attention with an initial and a final state."""

from typing import ClassVar

from .configuration_fla import FlaConfigMixin as FlaConfigMixin
from .configuration_fla import GatedLinearAttentionConfig
from .configuration_stateful import StatefulConfigMixin as StatefulConfigMixin
from .forgetting import Forgetting as Forgetting

FEATURE_MAPS = ("hedgehog", "t2r", "elementwise_product", "dpfp", "elu", "relu", "identity")


class StatefulLinearAttentionConfig(GatedLinearAttentionConfig):
    """Fields of fla's `LinearAttentionConfig`, of `FlaConfigMixin`, and:

    Args:
        feature_map: Applied to queries and keys: one of `FEATURE_MAPS`.
        tie_feature_map_qk: False; one feature map under two names is not supported.
        norm_q: Whether mapped queries are divided by their sum.
        norm_k: Whether mapped keys are divided by their sum.
        norm_feature_map: Whether outputs are divided by the sum of their weights.
    """

    model_type = "stateful_linear_attention"
    upstream_types: ClassVar[tuple[str, ...]] = ("linear_attn",)
    lora_target_modules: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")

    feature_map: str = "elementwise_product"
    tie_feature_map_qk: bool = False
    norm_q: bool = False
    norm_k: bool = False
    norm_feature_map: bool = False

    def check(self) -> None:
        """See `GatedLinearAttentionConfig.check`."""
        super().check()
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {FEATURE_MAPS}, got {self.feature_map!r}.")
        if self.tie_feature_map_qk:
            raise ValueError("tie_feature_map_qk must be False, got True: it is not supported.")


StatefulLinearAttentionConfig.register_for_auto_class()
