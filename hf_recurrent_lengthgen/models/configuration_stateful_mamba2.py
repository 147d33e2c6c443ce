"""Configuration of Mamba-2 with an initial and a final state."""

from transformers import Mamba2Config

from .configuration_mamba import ReferenceLayersConfigMixin


class StatefulMamba2Config(ReferenceLayersConfigMixin, Mamba2Config):
    """`Mamba2Config` plus the fields of `StatefulConfigMixin` and `ReferenceLayersConfigMixin`.

    `chunk_size` is the tile of the GPU kernel; the torch scan has its own. Neither changes results.
    Only `hidden_act="silu"` is supported.
    """

    model_type = "stateful_mamba2"
    display_name = "Mamba-2"
    hub_tags = ("state-space-model",)
    forgets_by = ("retention", "insertion", "window", "delta_scale", "decay_scale")
    upstream_types = ("mamba2",)
    layouts = ("transformers", "mamba-ssm", "fla")
    tiny = {"state_size": 16, "n_groups": 1, "num_heads": 8, "head_dim": 16}  # noqa: RUF012
    lora_target_modules = ("in_proj", "out_proj")

    def check(self) -> None:
        super().check()
        self.part("num_heads", self.num_heads, self.n_groups)
