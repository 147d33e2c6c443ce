"""Weight decay, and hyperparameter search."""

from pathlib import Path

import pytest
from transformers.trainer_utils import HPSearchBackend

from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    LearnedStateConfig,
    LearnedStateTrainer,
    RandomNoiseConfig,
    RandomNoiseTrainer,
    ZeroStateTrainer,
)
from tests.models.families import FAMILIES, Family, build, variant_id
from tests.trainers import toys


def decayed(trainer: ZeroStateTrainer | LearnedStateTrainer) -> set[str]:
    """Names of the parameters that the optimizer decays."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    return {names[id(parameter)] for group in groups if group["weight_decay"] for parameter in group["params"]}


def test_only_matrices_of_mamba_are_decayed(tmp_path: Path) -> None:
    for family in FAMILIES[:2]:  # Mamba-2; Mamba-1, whose A_log is a matrix
        trainer = ZeroStateTrainer(build(family), InitialStateConfig(str(tmp_path), **toys.QUIET, weight_decay=0.1))
        found = decayed(trainer)
        assert any(name.endswith("A_log") for name, _ in trainer.model.named_parameters())
        assert any(name.endswith("in_proj.weight") for name in found)
        assert [name for name in found if name.endswith(("A_log", ".D", "bias", "norm.weight"))] == []


LARGE = {
    "rwkv5": "key value receptance gate output",
    "rwkv6": "r_proj k_proj v_proj g_proj o_proj key value receptance",
    "rwkv7": "r_proj k_proj v_proj o_proj key value",
}
"""The matrices of a layer that the authors decay, those of two dimensions whose names end with .weight in RWKV-LM."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in LARGE], ids=variant_id)
def test_only_large_matrices_of_rwkv_are_decayed(tmp_path: Path, family: Family) -> None:
    trainer = ZeroStateTrainer(build(family), InitialStateConfig(str(tmp_path), **toys.QUIET, weight_decay=0.1))
    found = {name.removesuffix(".weight").removesuffix(".linear").split(".")[-1] for name in decayed(trainer)}
    assert found == {"embeddings", trainer.model.head_name, *LARGE[family.name].split()}


def test_a_learned_state_is_not_decayed(tmp_path: Path) -> None:
    config = LearnedStateConfig(str(tmp_path), **toys.QUIET, weight_decay=0.1)
    assert decayed(LearnedStateTrainer(toys.tiny_model(), config)) == set()


def test_a_trial_of_a_search_changes_the_source(tmp_path: Path) -> None:
    config = RandomNoiseConfig(str(tmp_path), **toys.QUIET, noise_sigma=0.1)
    trainer = RandomNoiseTrainer(toys.tiny_model(), config, train_dataset=toys.sequences(8))
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.args.noise_sigma = 0.7  # as Trainer does before it makes the loader of a trial
    trainer.get_train_dataloader()
    assert trainer.initial_states.sigma == 0.7
