"""Configuration of Kimi Delta Attention with an initial and a final state."""

from .configuration_fla import HeadDimConfig


class StatefulKDAConfig(HeadDimConfig):
    """Fields of fla's `KDAConfig`, of `HeadDimConfig`, and:

    Args:
        lower_bound: Below 0: log decays are this bound times a sigmoid; None for minus a softplus.
        safe_gate: Whether A_log starts from 0, and the kernels may rely on the bound.
    """

    model_type = "stateful_kda"
    display_name = "Kimi Delta Attention"
    hub_tags = ("linear-attention", "delta-rule")
    upstream_types = ("kda",)
    layouts = ("fla",)
    tiny = {"num_heads": 2, "head_dim": 16}  # noqa: RUF012
    lora_target_modules = (*(f"{name}_proj" for name in "qkvbo"), "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1")

    num_heads: int = 16
    safe_gate: bool = False
    lower_bound: float | None = None

    @property
    def gate_rank(self) -> int:
        """Rank of the projections to gates: value dim of the heads that `layer_num_heads` merges."""
        return int(self.expand_v * self.head_dim)
