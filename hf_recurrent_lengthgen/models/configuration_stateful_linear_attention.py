"""Configuration of linear attention with an initial and a final state."""

from .configuration_fla import GatedLinearAttentionConfig


class StatefulLinearAttentionConfig(GatedLinearAttentionConfig):
    """Fields of fla's `LinearAttentionConfig`, of `GatedLinearAttentionConfig`, and:

    Args:
        feature_map: Applied to queries and keys: "hedgehog", "t2r", "elementwise_product", "dpfp", "elu", "relu"
            or "identity".
        tie_feature_map_qk: False; one feature map under two names is not supported.
        norm_q: Whether mapped queries are divided by their sum.
        norm_k: Whether mapped keys are divided by their sum.
        norm_feature_map: Whether outputs are divided by the sum of their weights.
    """

    model_type = "stateful_linear_attention"
    display_name = "linear attention"
    hub_tags = ("linear-attention",)
    forgets_by = ("retention",)
    upstream_types = ("linear_attn",)
    layouts = ("fla",)
    tiny = {"num_heads": 4}  # noqa: RUF012
    lora_target_modules = ("q_proj", "k_proj", "v_proj", "o_proj")

    choices = GatedLinearAttentionConfig.choices | {
        "feature_map": ("hedgehog", "t2r", "elementwise_product", "dpfp", "elu", "relu", "identity"),
        "tie_feature_map_qk": (False,),
    }

    feature_map: str = "elementwise_product"
    tie_feature_map_qk: bool = False
    norm_q: bool = False
    norm_k: bool = False
    norm_feature_map: bool = False
