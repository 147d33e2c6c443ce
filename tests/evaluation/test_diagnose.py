"""All diagnoses of a model in one go are those of the single functions, or are refused with the reason."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_recurrent_lengthgen.evaluation.constant_prompt import constant_prompt
from hf_recurrent_lengthgen.evaluation.diagnose import PARTS, diagnose_model
from hf_recurrent_lengthgen.evaluation.diagnosis_results import Diagnosis
from hf_recurrent_lengthgen.evaluation.effective_remembrance import effective_remembrance
from hf_recurrent_lengthgen.evaluation.evaluate import evaluate_model
from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.state_diagnosis import diagnose_states
from hf_recurrent_lengthgen.evaluation.state_trajectory import StateObserver
from tests.models.families import GLA, MAMBA2, VOCABULARY, build, variant_id

T = 16
SETTINGS: Any = {"label": "m", "data_description": "random ids", "command": "test", "progress": False}


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, VOCABULARY, (3, 101))


@pytest.fixture(params=[MAMBA2, GLA], ids=variant_id)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param).eval()


def test_each_part_is_that_of_its_own_function(model: Any, tokens: np.ndarray) -> None:
    found = diagnose_model(model, tokens, T, repeated_token=3, role="base", **SETTINGS)
    assert (found.role, found.refused) == ("base", {})
    alone = evaluate_model(model, tokens, T, **SETTINGS)
    assert found.evaluation.harm.last.mean == pytest.approx(alone.harm.last.mean, abs=1e-5)
    assert found.remembrance == effective_remembrance(model, tokens, T, progress=False)
    assert found.constant_prompt == constant_prompt(model, 3, T, 100, progress=False)
    misalignment = long_short_misalignment(model, tokens, T, progress=False)
    assert found.misalignment is not None
    assert found.misalignment.mean == misalignment.mean
    states = diagnose_states(model, tokens, T, label="m", data_description="random ids", progress=False)
    assert found.states is not None
    assert found.states.positions == states.positions
    np.testing.assert_allclose(found.states.std, states.std, rtol=2e-3)  # four digits are kept
    for (layer, head), (other_layer, other) in zip(found.states.ranking, states.ranking, strict=True):
        assert (layer.layer, head.head) == (other_layer.layer, other.head)
        assert head.late_distance == pytest.approx(other.late_distance, rel=1e-2)
    document = Diagnosis("both", (found,), None)
    assert from_json(to_json(document), Diagnosis) == document


def test_parts_that_are_not_asked_for_are_left_out(model: Any, tokens: np.ndarray) -> None:
    found = diagnose_model(model, tokens, T, parts=("misalignment",), **SETTINGS)
    assert (found.states, found.remembrance, found.constant_prompt) == (None, None, None)
    assert found.misalignment is not None
    assert found.refused == {}
    with pytest.raises(ValueError, match=rf"parts must be among {PARTS[0]}, .*, got state\.$"):
        diagnose_model(model, tokens, T, parts=("state",), **SETTINGS)


def test_what_cannot_be_measured_is_said(tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    found = diagnose_model(model, tokens, T, **SETTINGS)
    assert found.states is None
    assert "LlamaForCausalLM carries no state that is a value" in found.refused["states"]
    assert "no single token for a line break" in found.refused["constant prompt"]
    assert found.remembrance == effective_remembrance(model, tokens, T, progress=False)
    alone = diagnose_model(build(MAMBA2).eval(), tokens[:1], T, repeated_token=3, **SETTINGS)
    assert list(alone.refused) == ["states"]
    assert "needs at least two texts" in alone.refused["states"]


@pytest.mark.parametrize("length", [T + 1, T + 3, 3 * T // 2 - 1])
def test_texts_a_little_beyond_training_are_diagnosed(length: int, model: Any, tokens: np.ndarray) -> None:
    found = diagnose_model(model, tokens[:, : length + 1], T, repeated_token=3, **SETTINGS)
    assert found.refused == {}
    assert found.states is not None
    assert found.states.patching is not None


@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("states", "describe_states"),
        ("remembrance", "effective_remembrance"),
        ("misalignment", "long_short_misalignment"),
        ("constant prompt", "constant_prompt"),
    ],
)
def test_a_part_that_cannot_be_measured_leaves_the_others(
    part: str, function: str, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("cannot be measured here.")

    monkeypatch.setattr(f"hf_recurrent_lengthgen.evaluation.diagnose.{function}", refuse)
    found = diagnose_model(build(MAMBA2).eval(), tokens, T, repeated_token=3, **SETTINGS)
    assert found.refused == {part: "cannot be measured here."}
    measured = [found.states, found.remembrance, found.misalignment, found.constant_prompt]
    assert [value is None for value in measured] == [name == part for name in PARTS]
    assert found.evaluation.evaluated_length == 100


def test_an_error_of_the_observer_leaves_the_evaluation(tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("this state cannot be looked at.")

    monkeypatch.setattr(StateObserver, "see", refuse)
    found = diagnose_model(build(MAMBA2).eval(), tokens, T, parts=("states",), **SETTINGS)
    assert found.refused == {"states": "this state cannot be looked at."}
    assert found.evaluation.evaluated_length == 100


def test_a_model_that_rules_out_tokens_has_all_parts(tokens: np.ndarray) -> None:
    model = build(MAMBA2).eval()
    hidden = VOCABULARY - 1

    def mask(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([hidden]), -torch.inf)

    model.lm_head.register_forward_hook(mask)
    found = diagnose_model(model, tokens.clip(0, hidden - 1), T, repeated_token=3, **SETTINGS)
    assert found.refused == {}
    assert found.misalignment is not None
    assert np.isfinite(found.misalignment.mean)


def test_states_are_kept_before_heads_are_patched(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt of the patching, and another number of patched heads, read no stream again."""
    model, cache = build(MAMBA2).eval(), ResultCache(tmp_path)
    settings: Any = {**SETTINGS, "parts": ("states",), "cache": cache}

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_recurrent_lengthgen.evaluation.state_diagnosis.patch_heads", stop)
        with pytest.raises(KeyboardInterrupt):
            diagnose_model(model, tokens, T, **settings)
    monkeypatch.setattr(StateObserver, "see", stop)
    found = diagnose_model(model, tokens, T, patched_heads=2, **settings).states
    assert found is not None
    assert found.patching is not None
    assert diagnose_model(model, tokens, T, patched_heads=0, **settings).states == replace(found, patching=None)


def test_a_kept_diagnosis_reads_nothing_again(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = build(MAMBA2).eval(), ResultCache(tmp_path)
    settings = {**SETTINGS, "repeated_token": 3, "cache": cache}
    first = diagnose_model(model, tokens, T, **settings)

    @functools.wraps(type(model).forward)
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(type(model), "forward", never)
    again = diagnose_model(model, tokens, T, **{**settings, "label": "other name"})
    assert again.evaluation.model == "other name"
    assert again.states is not None
    assert again.states.model == "other name"
    assert again.remembrance == first.remembrance
    assert again.misalignment == first.misalignment
    assert again.constant_prompt == first.constant_prompt
    with pytest.raises(AssertionError):
        diagnose_model(model, tokens, T, **{**settings, "repeated_token": 4})


def test_states_are_seen_in_the_stream_of_the_evaluation(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream for both; and with the evaluation kept, the stream alone."""
    model = build(MAMBA2).eval()
    read = [0]
    forward = model.forward

    def counting(input_ids: Any, *given: Any, initial_state: Any = None, **arguments: Any) -> Any:
        read[0] += input_ids.numel()
        return forward(input_ids, *given, initial_state=initial_state, **arguments)

    monkeypatch.setattr(model, "forward", counting)
    evaluate_model(model, tokens, T, **SETTINGS)
    evaluation, read[0] = read[0], 0
    with_states: Any = {**SETTINGS, "parts": ("states",), "patched_heads": 0}
    diagnose_model(model, tokens, T, **with_states)
    assert read[0] == evaluation
    cache = ResultCache(tmp_path)
    evaluate_model(model, tokens, T, cache=cache, **SETTINGS)
    read[0] = 0
    diagnose_model(model, tokens, T, cache=cache, **with_states)
    assert read[0] == 3 * 100
    read[0] = 0
    diagnose_model(model, tokens, T, cache=cache, **with_states)
    assert read[0] == 0
