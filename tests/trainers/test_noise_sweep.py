"""The sweep of sigma is one run of RandomNoiseTrainer for each."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from hf_recurrent_lengthgen.trainers import RandomNoiseConfig, RandomNoiseTrainer, sweep_sigma


def config(toys: ModuleType, folder: Path, **changes: Any) -> RandomNoiseConfig:
    settings = {"max_steps": 2, "learning_rate": 0.01, "save_strategy": "no"}
    return RandomNoiseConfig(str(folder), **toys.QUIET, **settings | changes)


def test_every_sigma_is_trained_from_the_same_model(toys: ModuleType, tmp_path: Path) -> None:
    models: list[nn.Module] = []

    def score(model: nn.Module) -> float:
        models.append(model)
        return float(len(models))

    data = toys.sequences(16)
    scores = sweep_sigma(toys.tiny_model, config(toys, tmp_path), [0.1, 3.0], score, train_dataset=data)
    assert scores == {0.1: 1.0, 3.0: 2.0}
    for sigma, swept in zip(scores, models, strict=True):
        alone = RandomNoiseTrainer(
            toys.tiny_model(), config(toys, tmp_path / "alone", noise_sigma=sigma), train_dataset=data
        )
        alone.train()
        toys.assert_same_weights(toys.weights(swept), toys.weights(alone.model))
    with pytest.raises(AssertionError):
        toys.assert_same_weights(*(toys.weights(model) for model in models))


@pytest.mark.parametrize("sigmas", [[], [0.1, 0.1]])
def test_no_or_doubled_sigmas_are_refused(toys: ModuleType, tmp_path: Path, sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match="different numbers"):
        sweep_sigma(toys.tiny_model, config(toys, tmp_path), sigmas, lambda model: 0.0)
