"""Configuration of Mamba-1 and FalconMamba with an initial and a final state."""

from collections.abc import Mapping
from typing import Any

from transformers import MambaConfig

from .configuration_mamba import ReferenceLayersConfigMixin

FLA_NAMES = {
    **{f"dt_{name}": f"time_step_{name}" for name in ("rank", "scale", "init_scheme", "min", "max")},
    "dt_init_floor": "time_step_floor",
    "norm_eps": "layer_norm_epsilon",
}
"""What flash-linear-attention calls fields of `MambaConfig`."""


class StatefulMambaConfig(ReferenceLayersConfigMixin, MambaConfig):
    """`MambaConfig` plus the fields of `ReferenceLayersConfigMixin`, FalconMamba's epsilon, and sizes of each layer.

    Only `hidden_act="silu"` is supported. `use_mambapy` and `use_associative_scan` choose among Transformers' own
    scans and mean nothing here.

    Args:
        mixer_rms_eps: Epsilon of FalconMamba's weightless norms of the step, B and C, as in `FalconMambaConfig`;
            None for Mamba, which has no such norms.
    """

    model_type = "stateful_mamba"
    display_name = "Mamba"
    hub_tags = ("state-space-model",)
    forgets_by = ("insertion", "delta_scale", "decay_scale")
    upstream_types = ("mamba", "falcon_mamba")
    layouts = ("transformers", "mamba-ssm", "fla")
    tiny = {"state_size": 8}  # noqa: RUF012
    lora_target_modules = ("in_proj", "x_proj", "dt_proj", "out_proj")

    choices = ReferenceLayersConfigMixin.choices | {"time_step_init_scheme": ("random", "constant")}

    mixer_rms_eps: float | None = None

    @classmethod
    def name_of(cls, values: Mapping[str, Any]) -> str:
        """See `StatefulConfigMixin`; FalconMamba has its epsilon, and a model type of its own upstream."""
        falcon = values.get("model_type") == "falcon_mamba" or values.get("mixer_rms_eps") is not None
        return "FalconMamba" if falcon else cls.display_name

    @classmethod
    def from_upstream(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        """See `StatefulConfigMixin`; a FalconMamba file may lack `mixer_rms_eps`, which means 1e-6 there.

        Files of fla have names of their own.
        """
        if config_dict.get("model_type") == "falcon_mamba":
            config_dict = {"mixer_rms_eps": 1e-6} | config_dict
        if config_dict.get("model_type") in cls.upstream_types:
            config_dict = {FLA_NAMES.get(name, name): value for name, value in config_dict.items()}
        return super().from_upstream(config_dict)
