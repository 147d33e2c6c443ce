"""Configuration of GLA with an initial and a final state."""

from .configuration_fla import GatedLinearAttentionConfig


class StatefulGLAConfig(GatedLinearAttentionConfig):
    """Fields of fla's `GLAConfig`, of `GatedLinearAttentionConfig`, and:

    Args:
        feature_map: Applied to queries and keys: "relu", "sigmoid", "logsigmoid", "silu", "swish", "sqrelu",
            "gelu" or None.
        use_short_conv: Whether a causal convolution with SiLU follows the projections to q, k and v.
        conv_size: Its taps K.
        use_output_gate: Whether outputs are multiplied by silu(g_proj(x)).
        clamp_min: Lower bound of the log decays, at most 0; None for none.
        gate_logit_normalizer: What the log-sigmoid of the gate is divided by.
        gate_low_rank_dim: Rank of the projection to the gate.
    """

    model_type = "stateful_gla"
    display_name = "GLA"
    hub_tags = ("linear-attention",)
    upstream_types = ("gla",)
    layouts = ("fla",)
    tiny = {"num_heads": 4}  # noqa: RUF012
    lora_target_modules = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0", "gk_proj.1", "o_proj")

    choices = GatedLinearAttentionConfig.choices | {
        "feature_map": (None, "relu", "sigmoid", "logsigmoid", "silu", "swish", "sqrelu", "gelu")
    }

    expand_k: int | float = 0.5
    feature_map: str | None = None
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    clamp_min: float | None = None
    gate_logit_normalizer: int | float = 16
    gate_low_rank_dim: int = 16
