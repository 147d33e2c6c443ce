"""Configuration of Mamba-2 with an initial and a final state."""

from typing import ClassVar

from transformers import Mamba2Config

from .configuration_reference import ReferenceLayersConfigMixin
from .configuration_stateful import StatefulConfigMixin as StatefulConfigMixin
from .forgetting import Forgetting as Forgetting


class StatefulMamba2Config(ReferenceLayersConfigMixin, Mamba2Config):
    """`Mamba2Config` plus the fields of `StatefulConfigMixin` and `ReferenceLayersConfigMixin`.

    `chunk_size` is the tile of the GPU kernel; the torch scan has its own. Neither changes results.
    Only `hidden_act="silu"` is supported.

    Args:
        layer_state_sizes: State dim N of each layer, where they differ (post-training state expansion,
            arXiv:2509.22630); None for `state_size` in all.
    """

    model_type = "stateful_mamba2"
    has_step_size: ClassVar[bool] = True
    upstream_types: ClassVar[tuple[str, ...]] = ("mamba2",)
    lora_target_modules: ClassVar[tuple[str, ...]] = ("in_proj", "out_proj")

    layer_state_sizes: list[int] | None = None

    def state_size_of(self, layer: int) -> int:
        """State dim N of one layer."""
        return self.state_size if self.layer_state_sizes is None else self.layer_state_sizes[layer]

    def check(self) -> None:
        """See `StatefulConfigMixin.check`; also the activation and sizes that do not go together."""
        super().check()
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f'hidden_act must be "silu", got {self.hidden_act!r}: the convolution is followed by SiLU.'
            )
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


StatefulMamba2Config.register_for_auto_class()
