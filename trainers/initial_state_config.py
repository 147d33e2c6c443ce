"""Settings that every method shares."""

from dataclasses import MISSING, dataclass, field, fields
from inspect import get_annotations
from typing import Any, Literal, Self

from transformers import TrainingArguments

from hf_recurrent_lengthgen.trainers.settings import check_settings


@dataclass
class InitialStateConfig(TrainingArguments):
    """`TrainingArguments` and what goes with every source of initial states.

    Raises:
        ValueError: for values out of range and for options that do not go together.
    """

    # Parameters that control the loss of arXiv:2506.11769
    alignment_alpha: float = field(
        default=0.0,
        metadata={
            "help": "Weight alpha of the output alignment loss (Output Alignment, Eq. 4). In the paper 0.1 to 0.3 are "
            "good, 0.5 and more hurts. Default 0: off."
        },
    )
    alignment_length: int | None = field(
        default=None,
        metadata={
            "help": "Length T in tokens of the two crops that are aligned. The rows must hold T + alignment_max_extra "
            "tokens. Default: as long as the rows allow, about two thirds of them."
        },
    )
    alignment_min_extra: int = field(
        default=1, metadata={"help": "Smallest shift l_extra between the two crops, in tokens. Default 1."}
    )
    alignment_max_extra: int | None = field(
        default=None,
        metadata={"help": "Largest shift l_extra between the two crops, in tokens. Default: T/2 - 1."},
    )

    # Parameters that control backpropagation through chunks
    bptt_chunk_length: int | None = field(
        default=None,
        metadata={
            "help": "Run each row in chunks of so many tokens and recompute their activations in the backward pass: "
            "rows may be longer than memory allows, gradients through the state stay exact. Default: rows at once."
        },
    )
    bptt_window: int | None = field(
        default=None,
        metadata={"help": "Chunks after which the gradient through the state is cut. Default: never."},
    )

    # Parameters that control what happens to states that break
    nonfinite_states: Literal["stop", "reset"] = field(
        default="stop",
        metadata={
            "help": "What to do with final states that hold NaN or infinite values, or exceed max_state_rms: stop the "
            "run, or reset these rows to zero and warn. A loss that is not finite always stops the run. Default: stop."
        },
    )
    max_state_rms: float | None = field(
        default=None,
        metadata={
            "help": "Root mean square of a layer's recurrent state, per row, above which it counts as exploded. "
            "Default: no limit."
        },
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.check()
        self.greater_is_better_given = self.greater_is_better is not None  # else TrainingArguments decides by the name
        super().__post_init__()

    def check(self) -> None:
        """Check what goes beyond type and range of single settings; methods extend it.

        Raises:
            ValueError: as this class says.
        """
        if self.output_dir == "":
            raise ValueError("output_dir is empty: give the name of a folder.")
        unused = [
            name
            for name in ("alignment_length", "alignment_min_extra", "alignment_max_extra")
            if getattr(self, name) != _default(name)
        ]
        if not self.alignment_alpha and unused:
            raise ValueError(f"{unused} need alignment_alpha above 0, for instance 0.1.")
        if self.alignment_max_extra is not None and self.alignment_max_extra < self.alignment_min_extra:
            raise ValueError(
                f"alignment_max_extra is {self.alignment_max_extra}, below alignment_min_extra "
                f"{self.alignment_min_extra}."
            )
        if self.bptt_window is not None and self.bptt_chunk_length is None:
            raise ValueError("bptt_window counts chunks: give bptt_chunk_length, too.")
        if self.bptt_chunk_length is not None and self.alignment_alpha:
            raise ValueError("bptt_chunk_length keeps no logits, which alignment_alpha needs: use one of them.")
        if self.bptt_chunk_length is not None and self.torch_compile:
            raise ValueError("bptt_chunk_length does not work with torch_compile: use one of them.")

    @classmethod
    def alone(cls, **settings: Any) -> Self:
        """The settings of the method without those of a run, which `TrainingArguments` would set up anew.

        Raises:
            ValueError: as this class says.
        """
        made = object.__new__(cls)
        defaults = {item.name: item.default for item in fields(cls) if item.default_factory is MISSING}
        factories = {item.name: item.default_factory() for item in fields(cls) if item.default_factory is not MISSING}
        vars(made).update(defaults | factories | settings)
        check_settings(made)
        made.check()
        return made

    @classmethod
    def method_fields(cls) -> set[str]:
        """The settings that the method's config classes have and `TrainingArguments` does not."""
        stock = {item.name for item in fields(TrainingArguments)}
        classes = [base for base in cls.__mro__ if issubclass(base, InitialStateConfig)]
        return {name for base in classes for name in get_annotations(base)} - stock

    def method_settings(self) -> dict[str, Any]:
        """The values of `method_fields`."""
        own = self.method_fields()
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name in own}


@dataclass
class CarriedStateConfig(InitialStateConfig):
    """What state passing and TBTT share.

    Raises:
        ValueError: if `state_drop_probability` is not between 0 and 1, and as `InitialStateConfig`.
    """

    state_drop_probability: float = field(
        default=0.0,
        metadata={
            "help": "Probability that a training sequence starts from the zero state instead of a carried one, drawn "
            "for each sequence on its own. Default 0."
        },
    )
    carry_conv_state: bool = field(
        default=True,
        metadata={
            "help": "Whether the short-convolution part of the state is carried, too (else it starts from zero). "
            "Default: true."
        },
    )


@dataclass
class NoiseConfig(InitialStateConfig):
    """What both kinds of noise share."""

    noise_at_evaluation: bool = field(
        default=False,
        metadata={
            "help": "Start evaluation from noise, too: an ablation, which hurts the first tokens (arXiv:2507.02782, "
            "section 4.2)."
        },
    )


def _default(name: str) -> Any:
    return InitialStateConfig.__dataclass_fields__[name].default
