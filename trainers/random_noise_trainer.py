"""Post-training from random noise of a given size."""

from typing import Any

from hf_recurrent_lengthgen.methods import Method
from hf_recurrent_lengthgen.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import zero_state_of
from hf_recurrent_lengthgen.trainers.noise_states import RandomNoise
from hf_recurrent_lengthgen.trainers.random_noise_config import RandomNoiseConfig


class RandomNoiseTrainer(InitialStateTrainer):
    """`Trainer` in which every sequence starts from N(0, sigma^2) (Buitrago Ruiz and Gu, 2025, section 4.2).

        trainer = RandomNoiseTrainer(model, RandomNoiseConfig("out", noise_sigma=0.3), train_dataset=blocks)

    Raises:
        ValueError: without `noise_sigma`, and as in `InitialStateTrainer`.
    """

    config_class = RandomNoiseConfig
    about = Method(
        "random_noise",
        "random noise states",
        "Training texts start from random states",
        "noise-states",
        UNEXPLORED_STATES,
    )
    args: RandomNoiseConfig

    @staticmethod
    def initial_state_source(args: RandomNoiseConfig, trainer: Any) -> RandomNoise:
        if args.noise_sigma is None:
            raise ValueError(
                "noise_sigma is missing: give the standard deviation of the initial states. Every training logs the "
                "root mean square of the model's states as state_rms: try values around it."
            )
        return RandomNoise(args.noise_sigma, zero_state_of(trainer), args.noise_at_evaluation)
