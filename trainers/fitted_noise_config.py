"""Settings of fitted noise."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import NoiseConfig


@dataclass
class FittedNoiseConfig(NoiseConfig):
    """`TrainingArguments` and the settings of fitted noise (Buitrago Ruiz and Gu, 2025, section 4.3)."""

    fitted_noise_beta: float = field(
        default=0.1,
        metadata={"help": "Weight of the past in the moving statistics, beta of Eq. 5 and 6. Default 0.1."},
    )
    fitted_noise_groups: int | None = field(
        default=None,
        metadata={
            "help": "Number of groups of heads in a layer that share statistics (of channels in Mamba-1). Default: "
            "each head has its own."
        },
    )
