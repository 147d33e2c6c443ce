"""Configuration of DeltaNet with an initial and a final state."""

from .configuration_fla import DeltaRuleConfig


class StatefulDeltaNetConfig(DeltaRuleConfig):
    """Fields of fla's `DeltaNetConfig`, of `DeltaRuleConfig`, and:

    Args:
        expand_k: Width of all keys over D; `expand_v` is that of all values over D.
        use_beta: Whether the rate of the rule depends on the token; else it is 1.
        use_gate: Whether outputs are multiplied by silu(g_proj(x)).
        qk_activation: Of queries and keys, "silu", "relu", "elu" or "identity".
        qk_norm: Norm that queries and keys are divided by, "l2" or "sum".
    """

    model_type = "stateful_delta_net"
    display_name = "DeltaNet"
    hub_tags = ("linear-attention", "delta-rule")
    forgets_by = ("retention",)
    upstream_types = ("delta_net",)
    layouts = ("fla",)
    tiny = {"num_heads": 2}  # noqa: RUF012
    lora_target_modules = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "o_proj")

    choices = DeltaRuleConfig.choices | {
        "qk_activation": ("silu", "relu", "elu", "identity"),
        "qk_norm": ("l2", "sum"),
        "use_output_norm": (True,),
    }

    num_heads: int = 16
    expand_k: int | float = 1.0
    use_beta: bool = True
    use_gate: bool = False
    qk_activation: str = "silu"
    qk_norm: str = "l2"
    use_output_norm: bool = True  # fla's layer always has the norm

    def check(self) -> None:
        super().check()
        for layer in range(self.num_hidden_layers):
            self.heads_of(layer)

    def heads_of(self, layer: int) -> tuple[int, int, int, int]:
        """Of one layer: heads of keys, heads of values H, key dim N, value dim P."""
        heads = self.num_heads if self.layer_num_heads is None else self.layer_num_heads[layer]
        keys = self.part("expand_k * hidden_size", self.expand_k * self.hidden_size, heads)
        values = self.part("expand_v * hidden_size", self.expand_v * self.hidden_size, heads)
        return heads, heads, keys, values
