"""Settings of StateX."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_recurrent_lengthgen.trainers.mixed_states_config import MixedStatesConfig


@dataclass
class StateXConfig(MixedStatesConfig):
    """`TrainingArguments`, how to expand the states (arXiv:2509.22630), and where initial states come from.

    Raises:
        ValueError: for values out of range, and as `MixedStatesConfig`.
    """

    # Parameters that control the expansion
    expand_layers: list[str] | None = field(
        default=None,
        metadata={
            "help": 'Layers to expand, counted from 0, or "all". Default: expand_count of them, one in every m from '
            "the first (StateX, 4.4)."
        },
    )
    expand_count: int | None = field(default=None, metadata={"help": "How many layers to expand. Default 4."})
    expand_factor: float | None = field(
        default=None,
        metadata={
            "help": "How many times larger the states of these layers become. Default: 4 in Mamba; in families with "
            "heads all of them become one."
        },
    )
    expand_state_size: int | None = field(
        default=None, metadata={"help": "State size N of these layers in Mamba. Default: see expand_factor."}
    )
    expand_num_heads: int | None = field(
        default=None, metadata={"help": "Heads of these layers in GLA and the like. Default: one."}
    )
    expand_initialization: Literal["reinit", "inherit"] | None = field(
        default=None,
        metadata={
            "help": "reinit starts the recurrence of these layers anew (the paper's choice, 4.3), inherit keeps what "
            "was trained. Default: reinit."
        },
    )
    new_weights_lr_multiplier: float = field(
        default=1.0,
        metadata={
            "help": "Learning rate of the parameters that hold new values over that of the others. A parameter counts "
            "as a whole, so in_proj of an expanded Mamba-2 layer with all rows. Default 1."
        },
    )

    def check(self) -> None:
        """See `MixedStatesConfig.check`; without a mixture, initial states are zero."""
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
    """ "all", or numbers."""
    layers = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if given is None or layers == ["all"]:
        return None if given is None else "all"
    try:
        return sorted({int(str(layer)) for layer in layers})  # str: 1.5 and True are no layers
    except ValueError as error:
        raise ValueError(f'expand_layers must be "all" or numbers of layers, got {given!r}.') from error
