"""Settings of random noise."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import NoiseConfig


@dataclass
class RandomNoiseConfig(NoiseConfig):
    """`TrainingArguments` and the settings of random noise (Buitrago Ruiz and Gu, 2025, section 4.2)."""

    noise_sigma: float | None = field(
        default=None,
        metadata={
            "help": "Standard deviation of every element of the initial recurrent state. Required, because it depends "
            "on the model (the paper sweeps it): try values around the state_rms that every training logs."
        },
    )
