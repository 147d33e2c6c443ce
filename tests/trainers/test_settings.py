"""Settings of every trainer: refused by name if no value of the type; weight decay; hyperparameter search."""

import dataclasses
import math
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from hf_recurrent_lengthgen.trainers import (
    INTERVENTIONS,
    InitialStateConfig,
    InitialStateTrainer,
    LearnedStateConfig,
    LearnedStateTrainer,
    RandomNoiseConfig,
    StatePassingConfig,
    StatePassingTrainer,
    StateXConfig,
    ZeroStateTrainer,
)
from tests.models.families import FAMILIES, Family, build, variant_id
from tests.trainers import toys

CONFIGS = sorted({trainer.config_class for trainer in INTERVENTIONS.values()}, key=lambda config: config.__name__)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
REQUIRED: dict[str, dict[str, Any]] = {"MixedStatesConfig": {"mixture": {"zero": 1.0}}}
WRONG: list[tuple[type, list[Any]]] = [
    (bool, ["no", "false", "true", 0, 1, 0.0, [], {}]),
    (float, ["1e-3", True, math.nan, math.inf, -math.inf, [], {}]),
    (int, ["8", True, 1.5, math.nan, math.inf, [], {}]),
]


def make(config: Any, folder: Path, **changes: Any) -> Any:
    return config(**{"output_dir": str(folder), "report_to": "none", **REQUIRED.get(config.__name__, {}), **changes})


def plain_fields(config: Any, kind: type) -> list[str]:
    """Fields of the package of one scalar type, or of it or None."""
    hints = get_type_hints(config)
    return [n for n in config.method_fields() if set(get_args(hints[n]) or (hints[n],)) - {type(None)} == {kind}]


@pytest.mark.parametrize("trainer", [InitialStateTrainer, *INTERVENTIONS.values()])
def test_annotations_of_trainers_can_be_evaluated(trainer: Any) -> None:
    assert get_type_hints(trainer).keys() >= {"about", "config_class"}
    assert get_type_hints(trainer.__init__)


@pytest.mark.thinned(5)
@every_config
def test_values_of_wrong_types_are_refused_in_every_field(config: Any, tmp_path: Path) -> None:
    assert "bptt_window" in plain_fields(config, int)
    for kind, values in WRONG:
        for name, value in product(plain_fields(config, kind), values):
            with pytest.raises(ValueError, match=rf"^{name} must be"):
                make(config, tmp_path, **{name: value})


@every_config
def test_negative_numbers_are_refused(config: Any, tmp_path: Path) -> None:
    for name in (*plain_fields(config, int), *plain_fields(config, float)):
        with pytest.raises(ValueError, match=rf"^{name} must be"):
            make(config, tmp_path, **{name: -2})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (StatePassingConfig, {"bptt_chunk_length": 0}, "bptt_chunk_length must be at least 1, got 0"),
        (RandomNoiseConfig, {"noise_sigma": "1e-3"}, "noise_sigma must be a number or None, got '1e-3'"),
        (StatePassingConfig, {"alignment_divergence": 3}, "alignment_divergence must be 'sce' or 'jeffreys', got 3"),
        (RandomNoiseConfig, {"noise_sigma": 0.0}, "noise_sigma must be a finite number above 0"),
        (StateXConfig, {"expand_initialization": "x"}, "expand_initialization must be 'reinit' or"),
    ],
    ids=str,
)
def test_what_is_refused_is_named_with_what_is_allowed(
    config: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make(config, tmp_path, **changes)


@every_config
def test_a_config_can_be_made_again_from_its_own_values(config: Any, tmp_path: Path) -> None:
    """Trainer's own parsing turns names into enumerations and mappings into objects, which are taken back."""
    first = make(config, tmp_path, accelerator_config={"even_batches": True}, eval_strategy="steps", eval_steps=2)
    assert dataclasses.replace(first, learning_rate=1).eval_strategy == first.eval_strategy


@pytest.mark.parametrize("parts", [{"bptt_chunk_length": 1}, {"context_parallel_size": 2}], ids=str)
def test_noise_that_would_be_scaled_by_the_length_of_parts_is_refused(parts: dict[str, int], tmp_path: Path) -> None:
    assert make(StatePassingConfig, tmp_path, neftune_noise_alpha=5.0).neftune_noise_alpha == 5.0
    with pytest.raises(
        ValueError, match="neftune_noise_alpha scales noise by the length of sequences, but with bptt_chunk"
    ):
        make(StatePassingConfig, tmp_path, neftune_noise_alpha=5.0, **parts)


def test_noise_on_embeddings_ends_with_a_run_that_fails(tmp_path: Path) -> None:
    """Or the next run on the model would add it twice."""
    model = toys.tiny_model()
    args = StatePassingConfig(str(tmp_path), neftune_noise_alpha=5.0, max_steps=2, use_cpu=True, report_to="none")
    trainer = StatePassingTrainer(model, args, train_dataset=toys.sequences(16))
    trainer.add_callback(toys.OnStep(1, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not model.get_input_embeddings()._forward_hooks


# --- weight decay, and hyperparameter search ---


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
