"""Configuration of RWKV-6 with an initial and a final state."""

from .configuration_fla import ExpandedHeadsConfig


class StatefulRWKV6Config(ExpandedHeadsConfig):
    """Fields of fla's `RWKV6Config`, of `ExpandedHeadsConfig`, and:

    Args:
        proj_low_rank_dim: Rank of the five data-dependent token shifts.
        gate_low_rank_dim: Rank of the data-dependent decay.
        norm_first: Whether the first layer norms the embeddings (`pre_norm`), and goes on from the result.
        norm_bias: Whether layer norms have a bias.
        group_norm_eps: Epsilon of the norm of each head's outputs; None for `norm_eps`, as in fla. Official weights
            were trained with 1e-5 * 8**2 = 6.4e-4.
    """

    model_type = "stateful_rwkv6"
    display_name = "RWKV-6"
    hub_tags = ("rwkv",)
    upstream_types = ("rwkv6",)
    layouts = ("fla", "rwkv", "rwkv-hf")
    tiny = {"num_heads": 2, "expand_k": 1}  # noqa: RUF012
    lora_target_modules = ("r_proj.linear", "k_proj.linear", "v_proj.linear", "g_proj.linear", "o_proj")
    choices = ExpandedHeadsConfig.choices | {"hidden_act": ("sqrelu",)}

    expand_k: int | float = 0.5
    hidden_ratio: int | float | None = 3.5
    hidden_act: str = "sqrelu"
    proj_low_rank_dim: int = 32
    gate_low_rank_dim: int = 64
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    group_norm_eps: float | None = None
