"""Configuration of linear attention with an initial and a final state."""

from .configuration_fla import GatedLinearAttentionConfig
from .configuration_stateful import PreTrainedConfig as PreTrainedConfig
from .configuration_stateful import StatefulConfigMixin as StatefulConfigMixin

FEATURE_MAPS = ("hedgehog", "t2r", "elementwise_product", "dpfp", "elu", "relu", "identity")


class StatefulLinearAttentionConfig(GatedLinearAttentionConfig):
    """Fields of fla's `LinearAttentionConfig`, of `GatedLinearAttentionConfig`, and:

    Args:
        feature_map: Applied to queries and keys: one of `FEATURE_MAPS`.
        tie_feature_map_qk: False; one feature map under two names is not supported.
        norm_q: Whether mapped queries are divided by their sum.
        norm_k: Whether mapped keys are divided by their sum.
        norm_feature_map: Whether outputs are divided by the sum of their weights.
    """

    model_type = "stateful_linear_attention"
    display_name = "linear attention"
    hub_tags = ("linear-attention",)
    upstream_types = ("linear_attn",)
    layouts = ("fla",)
    tiny = {"num_heads": 4}  # noqa: RUF012
    lora_target_modules = ("q_proj", "k_proj", "v_proj", "o_proj")

    feature_map: str = "elementwise_product"
    tie_feature_map_qk: bool = False
    norm_q: bool = False
    norm_k: bool = False
    norm_feature_map: bool = False

    def check(self) -> None:
        super().check()
        self.one_of("feature_map", FEATURE_MAPS)
        if self.tie_feature_map_qk:
            raise ValueError("tie_feature_map_qk must be False, got True: it is not supported.")
