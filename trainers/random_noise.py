"""Random noise: every sequence starts from a Gaussian (Buitrago Ruiz and Gu, 2025, section 4.2).

    h_{-1} ~ N(0, sigma^2)

Each sequence has its own generator, so its noise depends on (seed, step, micro-batch, global row) only. The states of
short convolutions and token shifts start from zero. CPU and GPU generators give different numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import zero_state_of
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource

ZeroState = Callable[[int], RecurrentState]
"""Makes the zero state of a model for a batch size."""


def standard_normal(place: BatchPlace, zero: RecurrentState) -> RecurrentState:
    """The zero state `zero` with its recurrent parts replaced by independent standard normal numbers."""
    device, dtype = zero[0].recurrent.device, zero[0].recurrent.dtype
    sizes = [layer.recurrent[0].numel() for layer in zero]
    rows = [
        torch.randn(sum(sizes), generator=place.row_generator(row, "noise", device), device=device, dtype=dtype)
        for row in range(place.rows)
    ]
    parts = torch.stack(rows).split(sizes, dim=1)
    return tuple(
        LayerState(part.reshape_as(layer.recurrent), layer.conv) for part, layer in zip(parts, zero, strict=True)
    )


class RandomNoise(InitialStateSource):
    """Every element of the recurrent state is drawn from N(0, sigma^2) (section 4.2).

    Args:
        sigma: Standard deviation, above 0. The paper sweeps it for each model, so it has no default.
        zero_state: Makes the zero state of the model.
    """

    def __init__(self, sigma: float, zero_state: ZeroState) -> None:
        self.sigma = sigma
        self._zero_state = zero_state

    def initial_state(self, place: BatchPlace) -> RecurrentState:
        noise = standard_normal(place, self._zero_state(place.rows))
        return tuple(LayerState(layer.recurrent.mul_(self.sigma), layer.conv) for layer in noise)


@dataclass
class RandomNoiseConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of random noise (Buitrago Ruiz and Gu, 2025, section 4.2)."""

    noise_sigma: float | None = option(
        None,
        "Standard deviation of every element of the initial recurrent state. Required, because it depends "
        "on the model (the paper sweeps it): try values around the state_rms that every training logs.",
    )


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
        return RandomNoise(args.noise_sigma, zero_state_of(trainer))
