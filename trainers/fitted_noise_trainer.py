"""Post-training from noise that resembles final states."""

from typing import Any

from hf_recurrent_lengthgen.methods import Method
from hf_recurrent_lengthgen.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import zero_state_of
from hf_recurrent_lengthgen.trainers.fitted_noise_config import FittedNoiseConfig
from hf_recurrent_lengthgen.trainers.noise_states import FittedNoise


class FittedNoiseTrainer(InitialStateTrainer):
    """`Trainer` from noise with the mean and variance of final states (Buitrago Ruiz and Gu, 2025, section 4.3).

    The statistics of each layer are read from the source:

        trainer = FittedNoiseTrainer(model, FittedNoiseConfig("out"), train_dataset=blocks)
        trainer.train()
        trainer.initial_states.statistics[0].mean  # of layer 0, one per head
    """

    config_class = FittedNoiseConfig
    about = Method(
        "fitted_noise",
        "fitted noise states",
        "Training texts start from random states with the mean and variance of final states",
        "noise-states",
        UNEXPLORED_STATES,
    )
    args: FittedNoiseConfig

    @staticmethod
    def initial_state_source(args: FittedNoiseConfig, trainer: Any) -> FittedNoise:
        return FittedNoise(
            zero_state_of(trainer), args.fitted_noise_beta, args.fitted_noise_groups, args.noise_at_evaluation
        )
