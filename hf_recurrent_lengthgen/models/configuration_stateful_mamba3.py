"""Configuration of Mamba-3 with an initial and a final state."""

from typing import Any, ClassVar

from .configuration_stateful import PreTrainedConfig, StatefulConfigMixin


class StatefulMamba3Config(StatefulConfigMixin, PreTrainedConfig):
    """Fields of fla's `Mamba3Config`, of `StatefulConfigMixin`, and:

    Args:
        decay_activation: What makes decay rates of their projection: "softplus" (fla, and mamba-ssm until May 2026),
            or "heavy_tail" (mamba-ssm since then): 1 + x where x is positive, else 1 / (1 - x).
        intermediate_size: Width of a gated MLP after each mixer; None for none. mamba-ssm rounds its `d_intermediate`
            up to a multiple of 128.
        state_size: Keys N of each head.
        num_heads: Heads H; None for `expand * hidden_size / head_dim`, the only possible number.
        head_dim: Values P of each head.
        n_groups: Groups of heads that share B and C before their biases.
        rope_fraction: Which part of the keys is turned by angles, 0.5 or 1.
        A_floor: Lowest decay rate.
        is_outproj_norm: Whether outputs are normed per head before the gate.
        is_mimo: Whether heads have several inputs and outputs; only False is supported. `mimo_rank`, their number, has
            no effect then.
        dt_min, dt_max, dt_init_floor: Of new weights: step sizes are log-uniform, and at least `dt_init_floor`.

    New weights are drawn as in mamba-ssm. `chunk_size` and `fuse_norm` choose an implementation there, and change
    nothing.
    """

    model_type = "stateful_mamba3"
    forgets_by = ("retention", "insertion", "delta_scale", "decay_scale")
    why_not_forget = "a token writes a second time with the step size of the token after it"
    display_name = "Mamba-3"
    hub_tags = ("state-space-model",)
    upstream_types = ("mamba3",)
    layouts = ("fla", "mamba-ssm")
    tiny = {"state_size": 16, "head_dim": 16}  # noqa: RUF012
    lora_target_modules = ("in_proj", "out_proj")
    attribute_map: ClassVar[dict[str, str]] = {  # names of the other Mamba families
        "layer_norm_epsilon": "norm_eps",
        "time_step_min": "dt_min",
        "time_step_max": "dt_max",
        "time_step_floor": "dt_init_floor",
    }
    initialization: ClassVar[str] = "mamba-ssm"
    choices = StatefulConfigMixin.choices | {
        **{"is_mimo": (False,), "hidden_act": ("silu", "swish")},  # the scans write once per token
        **{"decay_activation": ("softplus", "heavy_tail"), "rope_fraction": (0.5, 1.0)},
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    intermediate_size: int | None = None
    expand: int = 2
    state_size: int = 128
    num_heads: int | None = None
    head_dim: int = 64
    n_groups: int = 1
    rope_fraction: float = 0.5
    A_floor: float = 1e-4
    decay_activation: str = "softplus"
    is_outproj_norm: bool = False
    is_mimo: bool = False
    mimo_rank: int = 4
    use_bias: bool = False
    hidden_act: str = "silu"
    norm_eps: float = 1e-5
    residual_in_fp32: bool = True
    initializer_range: float = 0.02
    rescale_prenorm_residual: bool = True
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    chunk_size: int = 64
    fuse_norm: bool = True
    use_cache: bool = True
    tie_word_embeddings: bool = False

    @property
    def num_angles(self) -> int:
        """Pairs of keys that are turned, A."""
        return int(self.state_size * self.rope_fraction) // 2

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_heads is None:
            self.num_heads = self.expand * self.hidden_size // self.head_dim
        super().__post_init__(**kwargs)

    def check(self) -> None:
        super().check()
        if self.num_heads * self.head_dim != self.expand * self.hidden_size:  # type: ignore[operator]
            raise ValueError(
                f"num_heads * head_dim ({self.num_heads} * {self.head_dim}) must be hidden_size * expand "
                f"({self.hidden_size} * {self.expand})."
            )
        self.part("num_heads", self.num_heads, self.n_groups)  # type: ignore[arg-type]
