"""Configuration of Gated DeltaNet with an initial and a final state."""

from .configuration_fla import HeadDimConfig


class StatefulGatedDeltaNetConfig(HeadDimConfig):
    """Fields of fla's `GatedDeltaNetConfig`, of `HeadDimConfig`, and:

    Args:
        use_gate: Whether outputs are multiplied by a gate.
        output_gate_activation: Its activation, "swish", "silu" or "sigmoid".
    """

    model_type = "stateful_gated_deltanet"
    display_name = "Gated DeltaNet"
    hub_tags = ("linear-attention", "delta-rule")
    upstream_types = ("gated_deltanet",)
    layouts = ("fla",)
    tiny = {"num_heads": 2, "head_dim": 16}  # noqa: RUF012
    lora_target_modules = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj")

    choices = HeadDimConfig.choices | {"output_gate_activation": ("swish", "silu", "sigmoid")}

    num_hidden_layers: int = 21
    num_heads: int = 6
    head_dim: int = 256
    expand_v: int | float = 2.0
    use_gate: bool = True
    output_gate_activation: str = "swish"
