"""Settings of state passing."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import CarriedStateConfig


@dataclass
class StatePassingConfig(CarriedStateConfig):
    """`TrainingArguments` and the settings of state passing (arXiv:2507.02782, section 4.4)."""

    state_drop_probability: float = field(
        default=0.1,
        metadata={
            "help": "Probability that a training sequence starts from the zero state instead of a passed one, drawn "
            "for each sequence on its own. Default 0.1 in state passing, as in section 4.4, else 0."
        },
    )
    assume_shuffled: bool = field(
        default=False,
        metadata={
            "help": "State that the training data arrive shuffled, for streams and samplers that cannot be checked. "
            "Passed states must come from other sequences."
        },
    )
