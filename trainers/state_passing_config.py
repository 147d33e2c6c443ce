"""Settings of state passing."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import CarriedStateConfig


@dataclass
class StatePassingConfig(CarriedStateConfig):
    """`TrainingArguments` and the settings of state passing (Buitrago Ruiz and Gu, 2025, section 4.4)."""

    state_drop_probability: float = field(
        default=0.1,
        metadata={
            "help": "Probability that a training sequence starts from the zero state instead of a passed one, drawn "
            "independently for each sequence. Default 0.1 for state passing, as in the paper (section 4.4), else 0."
        },
    )
    assume_shuffled: bool = field(
        default=False,
        metadata={
            "help": "Declare that the training data are shuffled, for streams and samplers that cannot be checked: "
            "passed states must come from other sequences. Default: false."
        },
    )
