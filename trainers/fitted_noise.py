"""Fitted noise: sequences start from a Gaussian that resembles final states (Buitrago Ruiz and Gu, 2025, section 4.3).

h_{-1} ~ N(mean, variance), with the moving mean and variance of final states (Eq. 5 and 6)
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import zero_state_of
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource
from hf_recurrent_lengthgen.trainers.random_noise import ZeroState, standard_normal


class LayerStatistics(NamedTuple):
    """Mean and population variance of a layer's recurrent part per head, (H,) each; in Mamba-1 per channel, (D,)."""

    mean: Tensor
    variance: Tensor


class FittedNoise(InitialStateSource):
    """Noise with the moving mean and variance of final states, per layer and head (section 4.3, Eq. 5 and 6).

        mean     <- (1 - beta) Mean(h_T)     + beta mean
        variance <- (1 - beta) Variance(h_T) + beta variance

    Mean and (population) variance are taken over the sequences of a step, in all micro-batches and processes, over the
    head dim and over the state dim. Mamba-1 has no heads: its channels take their place. The first step starts from
    zero, and its states initialize the statistics.

    Args:
        zero_state: Makes the zero state of the model.
        beta: Weight of the past, 0.1 in the paper.
    """

    def __init__(self, zero_state: ZeroState, beta: float = 0.1) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"fitted_noise_beta must be at least 0 and below 1, got {beta}.")
        self.beta = beta
        self._zero_state = zero_state
        self._statistics: tuple[LayerStatistics, ...] | None = None
        self._sums: list[Tensor] | None = None

    @property
    def statistics(self) -> tuple[LayerStatistics, ...] | None:
        """Mean and variance of every layer, (heads,) each in float32; None before the end of the first step.

        (0,) for layers without a recurrent part.
        """
        return self._statistics

    def initial_state(self, place: BatchPlace) -> RecurrentState | None:
        """Fresh noise for every sequence; the zero state before the end of the first step."""
        if self._statistics is None:
            return None
        state = []
        noise = standard_normal(place, self._zero_state(place.rows))
        for layer, (mean, variance) in zip(noise, self._statistics, strict=True):
            by_head = _by_head(layer.recurrent)
            fitted = mean[:, None] + variance.sqrt()[:, None] * by_head
            state.append(LayerState(fitted.to(by_head).reshape_as(layer.recurrent), layer.conv))
        return tuple(state)

    def observe(self, place: BatchPlace, final_state: RecurrentState) -> None:
        sums = [_sums(layer.recurrent) for layer in final_state]
        if self._sums is not None:
            sums = [old + new for old, new in zip(self._sums, sums, strict=True)]
        self._sums = sums

    def end_step(self) -> None:
        """Move the statistics towards those of the step (Eq. 5 and 6)."""
        if self._sums is None:
            return
        sizes = [len(sums) for sums in self._sums]
        total = self.sum_over_processes(torch.cat(self._sums))
        self._sums = None
        fresh = [_moments(sums) for sums in total.split(sizes)]
        if self._statistics is not None:
            fresh = [
                LayerStatistics(*((1 - self.beta) * new + self.beta * old for new, old in zip(*pair, strict=True)))
                for pair in zip(fresh, self._statistics, strict=True)
            ]
        self._statistics = tuple(fresh)

    def reset(self) -> None:
        self._statistics, self._sums = None, None

    def state_dict(self) -> dict[str, Tensor]:
        """Statistics as `layers.{layer}.mean` and `layers.{layer}.variance`, (heads,) each."""
        return {
            f"layers.{index}.{name}": value.cpu()
            for index, layer in enumerate(self._statistics or ())
            for name, value in zip(LayerStatistics._fields, layer, strict=True)
        }

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.reset()
        layers = [f"layers.{index}" for index in range(len(tensors) // 2)]
        if layers:
            self._statistics = tuple(
                LayerStatistics(*(tensors[f"{layer}.{name}"].to(device) for name in LayerStatistics._fields))
                for layer in layers
            )

    def logs(self) -> dict[str, float]:
        """Root mean square of the means, and mean and maximum of the standard deviations, over layers and heads."""
        if self._statistics is None:
            return {}
        means = torch.cat([layer.mean for layer in self._statistics])
        deviations = torch.cat([layer.variance for layer in self._statistics]).sqrt()
        values = torch.stack([means.square().mean().sqrt(), deviations.mean(), deviations.max()]).tolist()
        return dict(zip(("fitted_mean_rms", "fitted_std", "fitted_std_max"), values, strict=True))


def _by_head(recurrent: Tensor) -> Tensor:
    """The elements of each head, (B, heads, n); (B, 0, 1) for a layer without a recurrent part."""
    return recurrent.reshape(*recurrent.shape[:2], -1) if recurrent.shape[1] else recurrent[..., None]


def _sums(recurrent: Tensor) -> Tensor:
    """Count, sum and sum of squares of each head, (heads, 3) in float64."""
    values, double = _by_head(recurrent), torch.float64
    squares = torch.linalg.vector_norm(values, dim=2, dtype=double).square()
    counts = values.new_full((values.shape[1],), len(values) * values.shape[2], dtype=double)
    return torch.stack([counts, values.sum(2, dtype=double).sum(0), squares.sum(0)], 1)


def _moments(sums: Tensor) -> LayerStatistics:
    count, total, squares = sums.unbind(1)
    mean = total / count
    return LayerStatistics(mean.float(), (squares / count - mean.square()).clamp(min=0).float())


@dataclass
class FittedNoiseConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of fitted noise (Buitrago Ruiz and Gu, 2025, section 4.3)."""

    fitted_noise_beta: float = option(
        0.1, "Weight of the previous statistics in the moving average, beta of Eq. 5 and 6. Default 0.1."
    )


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
        return FittedNoise(zero_state_of(trainer), args.fitted_noise_beta)
