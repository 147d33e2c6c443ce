"""What is refused or set right before training."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin

from hf_recurrent_lengthgen.models.forgetting import forgetting
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    LearnedStateConfig,
    LearnedStateTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.checks import keep_states_in_full_precision

TRAINERS: dict[str, Any] = {
    "zero_state": (ZeroStateTrainer, InitialStateConfig),
    "learned_state": (LearnedStateTrainer, LearnedStateConfig),
}
FORGETTING: list[dict[str, Any]] = [{"retention": 0.9999, "insertion": 0.75}, {"window": 8}, {"delta_scale": 0.5}]


def state_with(version: int) -> SimpleNamespace:
    reshard = True if version == 2 else "FULL_SHARD"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, reshard_after_forward=reshard)
    plugin.set_mixed_precision("bf16")
    return SimpleNamespace(fsdp_plugin=plugin)


def test_fsdp_casts_weights_but_not_the_states_that_go_in() -> None:
    state = state_with(2)
    assert state.fsdp_plugin.mixed_precision_policy.cast_forward_inputs
    keep_states_in_full_precision(state)
    policy = state.fsdp_plugin.mixed_precision_policy
    assert not policy.cast_forward_inputs
    assert policy.param_dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:FSDP1 is deprecated:FutureWarning")
def test_the_first_version_of_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        keep_states_in_full_precision(state_with(1))


def test_without_fsdp_nothing_happens() -> None:
    keep_states_in_full_precision(SimpleNamespace(fsdp_plugin=None))


@pytest.mark.parametrize("settings", FORGETTING, ids=str)
@pytest.mark.parametrize("method", ["zero_state", "learned_state"])
def test_a_model_that_is_made_to_forget_is_not_trained(
    method: str, settings: dict[str, Any], toys: ModuleType, tmp_path: Path
) -> None:
    trainer_class, config_class = TRAINERS[method]
    arguments = config_class(str(tmp_path / "run"), max_steps=1, save_strategy="no", **toys.QUIET)
    forgets, rows = toys.tiny_model(forgetting=settings), toys.sequences(8)
    with pytest.raises(ValueError, match=r"made to forget at inference .* set it afterwards"):
        trainer_class(forgets, arguments, train_dataset=rows)
    trainer = trainer_class(toys.tiny_model(), arguments, train_dataset=rows)
    with forgetting(trainer.model, **settings), pytest.raises(ValueError, match="made to forget at inference"):
        trainer.train()
    assert trainer.train().global_step == 1


def test_a_forgetting_that_changes_nothing_is_trained(toys: ModuleType, tmp_path: Path) -> None:
    arguments = InitialStateConfig(str(tmp_path / "run"), max_steps=1, save_strategy="no", **toys.QUIET)
    model = toys.tiny_model(forgetting={"retention": 1.0, "window": None})
    assert ZeroStateTrainer(model, arguments, train_dataset=toys.sequences(8)).train().global_step == 1
