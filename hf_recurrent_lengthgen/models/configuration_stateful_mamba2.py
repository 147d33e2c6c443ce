"""Configuration of Mamba-2 with an initial and a final state."""

from transformers import Mamba2Config

from .configuration_mamba import ReferenceLayersConfigMixin
from .configuration_stateful import PreTrainedConfig as PreTrainedConfig
from .configuration_stateful import StatefulConfigMixin as StatefulConfigMixin


class StatefulMamba2Config(ReferenceLayersConfigMixin, Mamba2Config):
    """`Mamba2Config` plus the fields of `StatefulConfigMixin` and `ReferenceLayersConfigMixin`.

    `chunk_size` is the tile of the GPU kernel; the torch scan has its own. Neither changes results.
    Only `hidden_act="silu"` is supported.
    """

    model_type = "stateful_mamba2"
    display_name = "Mamba-2"
    hub_tags = ("state-space-model",)
    forgets_by = ("retention", "insertion", "window", "delta_scale")
    upstream_types = ("mamba2",)
    layouts = ("transformers", "mamba-ssm", "fla")
    tiny = {"state_size": 16, "n_groups": 1, "num_heads": 8, "head_dim": 16}  # noqa: RUF012
    lora_target_modules = ("in_proj", "out_proj")

    def check(self) -> None:
        """See `ReferenceLayersConfigMixin.check`; also sizes that do not go together."""
        super().check()
        limit = tuple(self.time_step_limit)
        if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise ValueError(
                f"time_step_limit must be two ascending numbers of at least 0, got {self.time_step_limit}."
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of n_groups ({self.n_groups}).")
        if self.num_heads * self.head_dim != self.hidden_size * self.expand:
            raise ValueError(
                f"num_heads * head_dim ({self.num_heads} * {self.head_dim}) must be hidden_size * expand "
                f"({self.hidden_size} * {self.expand})."
            )
