"""Configuration of Mamba-1 and FalconMamba with an initial and a final state."""

from typing import Any, ClassVar

from transformers import MambaConfig

from .configuration_reference import ReferenceLayersConfigMixin
from .configuration_stateful import StatefulConfigMixin as StatefulConfigMixin
from .forgetting import Forgetting as Forgetting


class StatefulMambaConfig(ReferenceLayersConfigMixin, MambaConfig):
    """`MambaConfig` plus the fields of `ReferenceLayersConfigMixin`, FalconMamba's epsilon, and sizes of each layer.

    Only `hidden_act="silu"` is supported. `use_mambapy` and `use_associative_scan` choose among Transformers' own
    scans and mean nothing here.

    Args:
        mixer_rms_eps: Epsilon of FalconMamba's weightless norms of the step, B and C, as in `FalconMambaConfig`;
            None for Mamba, which has no such norms.
        layer_state_sizes: State dim N of each layer, where they differ (post-training state expansion,
            arXiv:2509.22630); None for `state_size` in all.
    """

    model_type = "stateful_mamba"
    has_step_size: ClassVar[bool] = True
    upstream_types: ClassVar[tuple[str, ...]] = ("mamba", "falcon_mamba")
    lora_target_modules: ClassVar[tuple[str, ...]] = ("in_proj", "x_proj", "dt_proj", "out_proj")

    mixer_rms_eps: float | None = None
    layer_state_sizes: list[int] | None = None

    def state_size_of(self, layer: int) -> int:
        """State dim N of one layer."""
        return self.state_size if self.layer_state_sizes is None else self.layer_state_sizes[layer]

    @classmethod
    def from_upstream(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        """See `StatefulConfigMixin`; a FalconMamba file may lack `mixer_rms_eps`, which means 1e-6 there."""
        if config_dict.get("model_type") == "falcon_mamba":
            config_dict = {"mixer_rms_eps": 1e-6} | config_dict
        return super().from_upstream(config_dict)

    def check(self) -> None:
        """See `StatefulConfigMixin.check`; also what has only one or two implementations, and sizes."""
        super().check()
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f'hidden_act must be "silu", got {self.hidden_act!r}: the convolution is followed by SiLU.'
            )
        if self.time_step_init_scheme not in ("random", "constant"):
            raise ValueError(
                f'time_step_init_scheme must be "random" or "constant", got {self.time_step_init_scheme!r}.'
            )


StatefulMambaConfig.register_for_auto_class()
