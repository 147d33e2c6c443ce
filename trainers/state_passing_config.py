"""Settings of state passing."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class StatePassingConfig(TrainingArguments):
    """`TrainingArguments` and the settings of state passing (arXiv:2507.02782, section 4.4).

    Raises:
        ValueError: if `state_drop_probability` is not between 0 and 1.
    """

    state_drop_probability: float = field(
        default=0.1,
        metadata={
            "help": "Probability that a training sequence starts from the zero state instead of a passed one, drawn "
            "for each sequence on its own. Default 0.1, as in section 4.4."
        },
    )
    carry_conv_state: bool = field(
        default=True,
        metadata={"help": "Whether the short-convolution part of the state is passed too (else it starts from zero)."},
    )
    assume_shuffled: bool = field(
        default=False,
        metadata={
            "help": "State that the training data arrive shuffled, for streams and samplers that cannot be checked. "
            "Passed states must come from other sequences."
        },
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.state_drop_probability <= 1.0:
            raise ValueError(f"state_drop_probability must be between 0 and 1, got {self.state_drop_probability}.")
        super().__post_init__()
