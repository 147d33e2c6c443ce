"""Settings of output alignment."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig


@dataclass
class AlignmentConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of output alignment, which is on by default."""

    alignment_alpha: float = field(
        default=0.1,
        metadata={
            "help": "Weight alpha of the output alignment loss (Du et al., 2025, Eq. 4). In the paper, 0.1 to 0.3 "
            "helps; 0.5 or more hurts. Default 0.1."
        },
    )
