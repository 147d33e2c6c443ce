"""Settings of random noise."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import NoiseConfig


@dataclass
class RandomNoiseConfig(NoiseConfig):
    """`TrainingArguments` and the settings of random noise (arXiv:2507.02782, section 4.2)."""

    noise_sigma: float | None = field(
        default=None,
        metadata={
            "help": "Standard deviation of every element of the initial recurrent state. Required: it depends on the "
            "model (the paper sweeps it: compare some values around the state_rms that any training logs)."
        },
    )
