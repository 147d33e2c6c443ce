"""Combinations that once went wrong without a word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.models.state_on_disk import load_state
from hf_recurrent_lengthgen.models.state_value import detach_state
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    LearnedStateConfig,
    LearnedStateTrainer,
    MixedStatesConfig,
    MixedStatesTrainer,
    RandomNoiseConfig,
    RandomNoiseTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    ZeroStateTrainer,
)
from tests.trainers import toys

Settings = Callable[..., Any]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A config for a few quiet steps."""

    def make(config: type[InitialStateConfig], **fields: Any) -> Any:
        few = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.01, "save_strategy": "no"}
        return config(str(tmp_path / "run"), **toys.QUIET | few | {"per_device_train_batch_size": 2} | fields)

    return make


def test_resets_inside_rows_belong_to_tbtt(settings: Settings) -> None:
    data = toys.chunks(24, reset_at_document=True, separator_id=2)
    with pytest.raises(ValueError, match="TBTT supports and RandomNoiseTrainer does not"):
        RandomNoiseTrainer(toys.tiny_model(), settings(RandomNoiseConfig, noise_sigma=1.0), train_dataset=data)


def test_rows_that_continue_are_no_evaluation_data(settings: Settings) -> None:
    for data in (toys.chunks(8), {"a": toys.chunks(8)}):
        with pytest.raises(ValueError, match="give PackedBlocks as eval_dataset"):
            ZeroStateTrainer(toys.tiny_model(), settings(InitialStateConfig), eval_dataset=data)


def test_data_that_are_replaced_are_checked(settings: Settings) -> None:
    trainer = StatePassingTrainer(toys.tiny_model(), settings(StatePassingConfig), train_dataset=toys.sequences(8))
    trainer.train_dataset = toys.chunks(24)
    with pytest.raises(ValueError, match="use TbttTrainer"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning")  # checkpoints within a second
@pytest.mark.parametrize("train_model", [True, False])
def test_the_best_learned_state_comes_back_with_the_best_weights(
    settings: Settings, tmp_path: Path, train_model: bool
) -> None:
    best = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    config = settings(
        LearnedStateConfig,
        train_model=train_model,
        load_best_model_at_end=True,
        greater_is_better=True,
        max_steps=4,
        **best,
    )
    data = toys.sequences(8)
    trainer = LearnedStateTrainer(toys.tiny_model(), config, train_dataset=data, eval_dataset=data)
    trainer.train()
    folder = Path(str(trainer.state.best_model_checkpoint))
    assert folder.name != "checkpoint-4"
    if not train_model:
        best, _ = load_state(folder / "learned_state.safetensors")
        torch.testing.assert_close(trainer.learned_state(), best, rtol=0, atol=0)
        return
    best_model = load_model(str(folder))
    torch.testing.assert_close(trainer.learned_state(), detach_state(best_model.first_state(1)), rtol=0, atol=0)
    toys.assert_same_weights(toys.weights(trainer.model), toys.weights(best_model))


def test_what_a_learner_leaves_in_a_model_is_named(settings: Settings) -> None:
    model, data = toys.tiny_model(), toys.sequences(8)
    with pytest.raises(ValueError, match="needs args of class LearnedStateConfig"):
        LearnedStateTrainer(model, settings(StatePassingConfig), train_dataset=data)
    assert model.learned_states is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    LearnedStateTrainer(model, settings(LearnedStateConfig), train_dataset=data).train()
    with pytest.raises(ValueError, match=r"call model\.learned_states\.set_adapter\(None\)"):
        ZeroStateTrainer(model, settings(InitialStateConfig), train_dataset=data)
    model.learned_states.set_adapter(None)
    with pytest.raises(ValueError, match=r"Call model\.requires_grad_\(True\)"):
        ZeroStateTrainer(model, settings(InitialStateConfig), train_dataset=data)


def test_the_settings_of_a_source_stand_beside_its_share(settings: Settings) -> None:
    sources = {
        "fitted_noise": {"share": 0.5, "fitted_noise_beta": 0.7},
        "state_passing": {"share": 0.5, "carry_conv_state": False, "assume_shuffled": True},
    }
    config = settings(MixedStatesConfig, mixture=sources)
    made = MixedStatesTrainer(toys.tiny_model(), config, train_dataset=toys.sequences(8)).initial_states.sources
    assert made["fitted_noise"].beta == 0.7
    assert (made["state_passing"].drop_probability, made["state_passing"].carry_conv_state) == (0.0, False)
    assert config.assume_shuffled
