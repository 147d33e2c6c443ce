"""The diagnosis as a whole: on a model of which one head is made to keep too much, as a document, and in pictures."""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.states import measure as state_diagnosis
from hf_recurrent_lengthgen.metrics.states.measure import diagnose_states
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from tests.hybrids.tiny_models import tiny_model
from tests.llamas import tiny_llama
from tests.models.families import (
    DELTA_FAMILIES,
    LINEAR_ATTENTION,
    MAMBA,
    MAMBA2,
    RWKV6,
    Family,
    build,
    random_tokens,
    variant_id,
)

QUIET = EvaluationSettings(progress=False)
T, LENGTH, SEQUENCES = 16, 512, 4


def one_head_keeps_all() -> Any:
    """Mamba-2 whose heads forget within few tokens, but head 2 of layer 1, which keeps everything."""
    model = build(MAMBA2)
    with torch.no_grad():
        for layer, block in enumerate(model.backbone.layers):
            block.mixer.A_log.fill_(1.5)
            block.mixer.dt_bias.fill_(1.0)
            if layer == 1:
                block.mixer.A_log[2] = -12.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_a_head_of_a_hybrid_that_keeps_everything_is_named_and_patched(model_type: str) -> None:
    """Random weights; `tests/test_examples_planted_fault.py` has trained models, of other mixers, too."""
    stock = tiny_model(model_type)
    mixers = [module for module in stock.modules() if hasattr(module, "A_log")]
    with torch.no_grad():
        for mixer in mixers:
            mixer.A_log.fill_(1.0)
    sound = copy.deepcopy(stock)
    with torch.no_grad():
        mixers[-1].A_log[1] = -12.0
    found: Any = diagnosed(stateful(stock), patched_heads=1)
    place = (mixers[-1].layer_idx, 1)
    assert [(head.layer, head.head) for head in found.drifting] == [place]
    assert [head.layer for head in found.heads if head.leaves_at is not None] == [place[0]]
    assert [group.heads for group in found.patching.groups[:1] + found.patching.groups[2:3]] == [(place,), (place,)]
    keys = found.patching.groups[-1]
    assert (keys.name, keys.heads, keys.attention) == ("attention", (), True)
    assert not any(group.attention for group in found.patching.groups[:-1])
    assert found.attention.borders[-1] == LENGTH - T
    assert not diagnosed(stateful(sound), patched_heads=0).drifting


def test_attention_that_cannot_be_set_apart_is_said_and_the_rest_kept() -> None:
    found = diagnose_states(stateful(tiny_model("bamba")), random_tokens(4, T + 9), T, QUIET, patched_heads=1)
    assert found.attention is None
    assert (
        "not measured apart from that from long attention: tokens of shape (4, 25) are too few" in found.left_out[-1]
    )
    assert found.patching is not None


def diagnosed(model: Any, **options: Any) -> StateDiagnosis:
    return diagnose_states(model, random_tokens(SEQUENCES, LENGTH + 1), T, QUIET, **options)


@pytest.fixture(scope="module")
def diagnosis() -> StateDiagnosis:
    return diagnosed(one_head_keeps_all(), patched_heads=2)


def test_the_head_that_keeps_everything_is_named(diagnosis: Any) -> None:
    assert [head.name for head in diagnosis.drifting] == ["layer 1, head 2"]
    head, *rest = diagnosis.ranking
    assert T < head.leaves_at <= 4 * T
    assert head.late_distance > 5 > rest[0].late_distance
    assert math.exp(head.log_retention[-1]) > 0.9
    others = [other.log_retention[-1] for other in rest if other.log_retention is not None]
    assert len(others) == 7
    assert max(others) < -100
    assert diagnosis.left_out == ()


def test_what_is_patched_and_in_which_order(diagnosis: Any) -> None:
    patching: Any = diagnosis.patching
    assert [group.name for group in patching.groups][:3] == ["the one that drifts", "the 7 others", "layer 1, head 2"]
    assert patching.groups[0].heads == ((1, 2),) == patching.groups[2].heads
    assert patching.groups[0].broken == patching.groups[2].broken
    assert len(patching.groups[1].heads) == 7
    assert abs(patching.groups[1].broken.mean) < abs(patching.groups[0].broken.mean)
    share = patching.share(patching.groups[0].restored)
    assert share == (patching.groups[0].restored.mean / patching.harm.mean if patching.harmful else None)
    none = replace(patching, harm=replace(patching.harm, mean=-0.1, low=-0.2, high=0.1))
    assert none.share(patching.groups[0].restored) is None


def test_stds_are_those_of_the_states(diagnosis: Any) -> None:
    model, tokens = one_head_keeps_all(), random_tokens(SEQUENCES, LENGTH + 1)
    place = diagnosis.positions.index(128)
    with torch.no_grad():
        state = model(tokens[:, :128]).final_state
    parts = [layer.recurrent.double().numpy() for layer in state]
    assert diagnosis.std[place] == pytest.approx(np.concatenate([part.ravel() for part in parts]).std(), rel=1e-3)
    head = next(head for head in diagnosis.heads if (head.layer, head.head) == (1, 2))
    assert head.std[place] == pytest.approx(parts[1][:, 2].std(), rel=1e-3)


@pytest.mark.parametrize("family", [MAMBA, LINEAR_ATTENTION, RWKV6], ids=variant_id)
def test_other_families(family: Family) -> None:
    found = diagnosed(build(family), patched_heads=1)
    assert {head.unit for head in found.heads} == {"channel group" if family is MAMBA else "head"}
    assert found.patching is not None
    if family is LINEAR_ATTENTION:  # nothing is forgotten
        assert len(found.drifting) == len(found.heads)
        assert all(head.log_retention and set(head.log_retention) == {0.0} for head in found.heads)


def test_what_is_left_out_is_said() -> None:
    model = one_head_keeps_all()
    with forgetting(model, retention=0.99):
        found = diagnosed(model, patched_heads=0)
    assert found.left_out == (
        "Retention was not measured in 2 of 2 layers: the model is made to forget, so its scans get other inputs than "
        "its layers computed.",
    )
    assert all(head.log_retention is None for head in found.heads)


@pytest.mark.parametrize("family", DELTA_FAMILIES, ids=variant_id)
def test_the_delta_rule_is_diagnosed_without_retention(family: Family) -> None:
    found = diagnosed(build(family), patched_heads=1)
    (reason,) = found.left_out
    assert "not measured in 2 of 2 layers: every key changes what earlier tokens wrote" in reason
    assert "lengthgen maps shows" in reason
    assert found.patching is not None
    assert len(found.heads) == sum(shape.recurrent[0] for shape in build(family).state_shapes())


@pytest.mark.parametrize("beyond", [1, 2, 7, 8, 9])
def test_texts_a_little_beyond_training_are_patched_with_what_they_have(beyond: int) -> None:
    model, tokens = build(MAMBA2), random_tokens(4, T + beyond + 1)
    found: Any = diagnose_states(model, tokens, T, QUIET, patched_heads=1)
    assert found.left_out == ()
    width = min(T // 2, beyond)
    assert (found.patching.position, found.patching.width) == (T + beyond - width, width)


def test_few_texts_are_reported_to_measure_no_drift() -> None:
    found = diagnose_states(one_head_keeps_all(), random_tokens(3, LENGTH + 1), T, QUIET, patched_heads=0)
    assert found.left_out == (
        "Drift of heads was not measured: 3 sequences cannot tell it from differences between texts; 4 or more can.",
    )
    assert found.drifting == ()
    assert found.ranking[0].late_distance > 5


def test_short_texts_and_wrong_lengths_are_refused() -> None:
    model = build(MAMBA2)
    with pytest.raises(ValueError, match="some beyond"):
        diagnose_states(model, random_tokens(2, T + 1), T, QUIET)
    with pytest.raises(ValueError, match="at least two sequences"):
        diagnose_states(model, random_tokens(1, 65), T, QUIET)
    with pytest.raises(ValueError, match="training_length"):
        diagnose_states(model, random_tokens(2, 65), 0, QUIET)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not carry a recurrent state by value"):
        diagnose_states(tiny_llama(), random_tokens(2, 65), T, QUIET)


def test_what_cannot_be_patched_is_said_and_the_rest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("no exchange.")

    monkeypatch.setattr(state_diagnosis, "patch_heads", refuse)
    found = diagnosed(build(MAMBA2))
    assert found.left_out == ("Heads were not patched: no exchange.",)
    assert found.patching is None
    assert len(found.heads) == 8
