"""Settings of StateX."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_recurrent_lengthgen.trainers.mixed_states_config import MixedStatesConfig


@dataclass
class StateXConfig(MixedStatesConfig):
    """`TrainingArguments`, the expansion of the states (Shen et al., 2025), and the mixture of initial states.

    Raises:
        ValueError: for values out of range, and as in `MixedStatesConfig`.
    """

    # Parameters that control the expansion
    expand_layers: list[str] | None = field(
        default=None,
        metadata={
            "help": 'Layers to expand, counted from 0, or "all". Default: expand_count evenly spaced layers from the '
            "first (Shen et al., 2025, section 4.4)."
        },
    )
    expand_count: int | None = field(default=None, metadata={"help": "Number of layers to expand. Default 4."})
    expand_factor: float | None = field(
        default=None,
        metadata={
            "help": "Factor by which the states of these layers grow. Default: 4 in Mamba; in other families, all "
            "heads of a layer are merged into one."
        },
    )
    expand_state_size: int | None = field(
        default=None, metadata={"help": "State size N of these layers in Mamba. Default: see expand_factor."}
    )
    expand_num_heads: int | None = field(
        default=None,
        metadata={"help": "Number of heads of these layers in families other than Mamba. Default: see expand_factor."},
    )
    expand_initialization: Literal["reinit", "reinit-transformers", "inherit"] | None = field(
        default=None,
        metadata={
            "help": "reinit initializes the recurrence of these layers anew, as in the paper (section 4.3), Mamba's "
            "as mamba-ssm does; reinit-transformers as Transformers does; inherit keeps the trained weights. Default: "
            "reinit."
        },
    )
    new_weights_lr_multiplier: float = field(
        default=1.0,
        metadata={
            "help": "Multiplier of the learning rate for parameters that hold new values. It applies to whole "
            "parameters: to all of in_proj in an expanded Mamba-2 layer. Default 1."
        },
    )

    def check(self) -> None:
        """See `MixedStatesConfig.check`; without a mixture, all initial states are zero."""
        if self.mixture is None:
            self.mixture = {"zero": 1.0}
        self.expand_layers = _layers(self.expand_layers)  # type: ignore[assignment]
        super().check()

    def expansion(self) -> dict[str, Any]:
        """The arguments of `expand_state`."""
        return {
            "layers": self.expand_layers,
            "count": self.expand_count,
            "factor": self.expand_factor,
            "state_size": self.expand_state_size,
            "num_heads": self.expand_num_heads,
            "initialization": "reinit" if self.expand_initialization is None else self.expand_initialization,
        }


def _layers(given: str | int | Iterable[int | str] | None) -> str | list[int] | None:
    """ "all", or layer numbers."""
    layers = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if given is None or layers == ["all"]:
        return None if given is None else "all"
    try:
        return sorted({int(str(layer)) for layer in layers})  # str refuses 1.5 and True
    except ValueError as error:
        raise ValueError(f'expand_layers must be "all" or layer numbers, got {given!r}.') from error
