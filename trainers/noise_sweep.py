"""Which sigma of random noise suits a model (arXiv:2507.02782, section 4.2 and appendix F)."""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_recurrent_lengthgen.trainers.random_noise_config import RandomNoiseConfig
from hf_recurrent_lengthgen.trainers.random_noise_trainer import RandomNoiseTrainer


def sweep_sigma(
    make_model: Callable[[], nn.Module],
    args: RandomNoiseConfig,
    sigmas: Sequence[float],
    score: Callable[[nn.Module], float],
    **trainer_arguments: Any,
) -> dict[float, float]:
    """Post-train one model for each sigma and score it.

    Args:
        make_model: Makes the model before post-training, a fresh one for each sigma.
        args: Arguments of every run but for `noise_sigma`; run sigma writes into `output_dir/sigma-{sigma}`.
        sigmas: Standard deviations to try. The `state_rms` that any trainer logs is a good middle.
        score: What to compare, for instance the loss on texts longer than the training length.
        trainer_arguments: The other arguments of `RandomNoiseTrainer`, such as `train_dataset`.

    Returns:
        Score of each sigma, in the order given.

    Raises:
        ValueError: for no or doubled sigmas, and as `RandomNoiseTrainer`.
    """
    if not sigmas or len(set(sigmas)) < len(sigmas):
        raise ValueError(f"sigmas must be different numbers, at least one, got {list(sigmas)}.")
    scores = {}
    for sigma in sigmas:
        run = copy.copy(args)
        run.noise_sigma = sigma
        run.output_dir = os.path.join(str(args.output_dir), f"sigma-{sigma:g}")
        trainer = RandomNoiseTrainer(make_model(), run, **trainer_arguments)
        trainer.train()
        assert isinstance(trainer.model, nn.Module)
        scores[sigma] = score(trainer.model)
    return scores
