"""All diagnoses of a model in one go are those of the single functions, or are refused with the reason."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings, EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.diagnosis.measure import diagnose_model
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment, long_short_misalignment
from hf_recurrent_lengthgen.metrics.parts import PARTS
from hf_recurrent_lengthgen.metrics.remembrance.measure import Remembrance, effective_remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt, constant_prompt
from hf_recurrent_lengthgen.metrics.states.measure import diagnose_states
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver
from tests.llamas import tiny_llama
from tests.models.families import GLA, MAMBA2, VOCABULARY, build, variant_id

T = 16
QUIET = DiagnosisSettings(command="test", progress=False)
QUIET_EVALUATION = EvaluationSettings(command="test", progress=False)


def diagnosed(model: Any, tokens: np.ndarray, cache: ResultCache | None = None, **options: Any) -> DiagnosedModel:
    return diagnose_model(model, tokens, T, settings=replace(QUIET, **options), cache=cache)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, VOCABULARY, (3, 101))


@pytest.fixture(params=[MAMBA2, GLA], ids=variant_id)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param).eval()


def test_a_number_that_no_file_takes_is_refused_by_its_part(
    tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(MAMBA2).eval()
    broken = replace(long_short_misalignment(model, tokens, T, samples=2, progress=False), mean=math.nan)
    part = replace(PARTS["misalignment"], compute=lambda _: broken)
    monkeypatch.setattr("hf_recurrent_lengthgen.metrics.diagnosis.measure.chosen_parts", lambda _: [part])
    found = diagnose_model(model, tokens, T, settings=QUIET)
    assert not found.parts
    assert "mean" in found.refused["misalignment"]


@pytest.mark.thinned(2)
def test_each_part_is_that_of_its_own_function(model: Any, tokens: np.ndarray) -> None:
    found = diagnose_model(model, tokens, T, settings=replace(QUIET, repeated_token=3), role="base")
    assert (found.role, found.refused) == ("base", {})
    assert list(found.parts) == list(PARTS)
    alone = evaluate_model(model, tokens, T, settings=QUIET_EVALUATION)
    assert found.evaluation.harm.last.mean == pytest.approx(alone.harm.last.mean, abs=1e-5)
    assert found.part(Remembrance) == effective_remembrance(model, tokens, T, QUIET_EVALUATION)
    assert found.part(ConstantPrompt) == constant_prompt(model, 3, T, 100, progress=False)
    assert found.part(Misalignment) == long_short_misalignment(model, tokens, T, progress=False)
    states, seen = diagnose_states(model, tokens, T, QUIET_EVALUATION), found.part(StateDiagnosis)
    assert seen.positions == states.positions
    np.testing.assert_allclose(seen.std, states.std, rtol=2e-3)  # four digits are kept
    for head, other in zip(seen.ranking, states.ranking, strict=True):
        assert head.name == other.name
        assert head.late_distance == pytest.approx(other.late_distance, rel=1e-2)
    document = Diagnosis("both", (found,))
    assert from_json(to_json(document), Diagnosis) == document


def test_parts_that_are_not_requested_are_left_out(model: Any, tokens: np.ndarray) -> None:
    found = diagnosed(model, tokens, parts=("misalignment",))
    assert (list(found.parts), found.refused) == (["misalignment"], {})
    with pytest.raises(ValueError, match=r"parts must be some of states, .*; got state\.$"):
        diagnosed(model, tokens, parts=("state",))


def test_remembrance_has_the_requested_distances(tokens: np.ndarray, tmp_path: Path) -> None:
    model, cache = build(MAMBA2).eval(), ResultCache(tmp_path)
    for names in ((), ("cosine",)):  # the first result in the cache is not taken for the second
        options: Any = {"parts": ("remembrance",), "remembrance_distances": names}
        found: Any = diagnosed(model, tokens, cache, **options).part(Remembrance)
        assert found == effective_remembrance(model, tokens, T, QUIET_EVALUATION, distances=names)
        assert list(found.others) == list(names)


def test_what_cannot_be_measured_is_said(tokens: np.ndarray) -> None:
    model = tiny_llama(vocab_size=VOCABULARY)
    found = diagnosed(model, tokens)
    assert "LlamaForCausalLM does not carry a recurrent state by value" in found.refused["states"]
    assert "no single token for a line break" in found.refused["constant prompt"]
    assert found.part(Remembrance) == effective_remembrance(model, tokens, T, QUIET_EVALUATION)
    alone = diagnosed(build(MAMBA2).eval(), tokens[:1], repeated_token=3)
    assert list(alone.refused) == ["states"]
    assert "at least two sequences" in alone.refused["states"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("states", "states.measure.describe_states"),
        ("remembrance", "remembrance.summary.effective_remembrance"),
        ("misalignment", "misalignment.long_short_misalignment"),
        ("constant prompt", "repeated_token.constant_prompt"),
    ],
)
def test_a_part_that_cannot_be_measured_leaves_the_others(
    part: str, function: str, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("cannot be measured here.")

    monkeypatch.setattr(f"hf_recurrent_lengthgen.metrics.{function}", refuse)
    found = diagnosed(build(MAMBA2).eval(), tokens, repeated_token=3)
    assert found.refused == {part: "cannot be measured here."}
    assert list(found.parts) == [name for name in PARTS if name != part]
    assert found.evaluation.evaluated_length == 100


def test_a_model_that_rules_out_tokens_has_all_parts(tokens: np.ndarray) -> None:
    model = build(MAMBA2).eval()
    hidden = VOCABULARY - 1

    def mask(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([hidden]), -torch.inf)

    model.lm_head.register_forward_hook(mask)
    found = diagnosed(model, tokens.clip(0, hidden - 1), repeated_token=3)
    assert found.refused == {}
    misalignment: Any = found.part(Misalignment)
    assert np.isfinite(misalignment.mean)


def test_states_are_kept_before_heads_are_patched(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt of the patching, and another number of patched heads, read no stream again."""
    model, cache = build(MAMBA2).eval(), ResultCache(tmp_path)
    settings: Any = {"parts": ("states",), "cache": cache}

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_recurrent_lengthgen.metrics.states.measure.patch_heads", stop)
        with pytest.raises(KeyboardInterrupt):
            diagnosed(model, tokens, **settings)
    monkeypatch.setattr(StateObserver, "see", stop)
    found: Any = diagnosed(model, tokens, patched_heads=2, **settings).part(StateDiagnosis)
    assert found.patching is not None
    bare = diagnosed(model, tokens, patched_heads=0, **settings).part(StateDiagnosis)
    assert bare == replace(found, patching=None)


def test_a_kept_diagnosis_reads_nothing_again(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = build(MAMBA2).eval(), ResultCache(tmp_path)
    first = diagnosed(model, tokens, cache, repeated_token=3)

    @functools.wraps(type(model).forward)
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(type(model), "forward", never)
    settings = replace(QUIET, repeated_token=3)
    again = diagnose_model(model, tokens, T, "other name", settings=settings, cache=cache)
    assert again.evaluation.model == "other name"
    assert again.parts == first.parts
    with pytest.raises(AssertionError):
        diagnosed(model, tokens, cache, repeated_token=4)


def test_states_are_seen_in_the_stream_of_the_evaluation(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream for both; and with the evaluation kept, the stream alone."""
    model = build(MAMBA2).eval()
    read = [0]
    forward = model.forward

    def counting(input_ids: Any, *args: Any, initial_state: Any = None, **arguments: Any) -> Any:
        read[0] += input_ids.numel()
        return forward(input_ids, *args, initial_state=initial_state, **arguments)

    monkeypatch.setattr(model, "forward", counting)
    evaluate_model(model, tokens, T, settings=QUIET_EVALUATION)
    evaluation, read[0] = read[0], 0
    with_states: Any = {"parts": ("states",), "patched_heads": 0}
    diagnosed(model, tokens, **with_states)
    assert read[0] == evaluation
    read[0] = 0
    diagnosed(model, tokens, parts=("states",), patched_heads=2)
    # 92 tokens of the long context, 8 of the short one, and 8 that are scored: from both states, and from both
    # exchanges of 3 or 4 groups
    assert read[0] - evaluation in (3 * (92 + 8 * (1 + 2 + 2 * groups)) for groups in (3, 4))
    cache = ResultCache(tmp_path)
    evaluate_model(model, tokens, T, settings=QUIET_EVALUATION, cache=cache)
    read[0] = 0
    diagnosed(model, tokens, cache, **with_states)
    assert read[0] == 3 * 100
    read[0] = 0
    diagnosed(model, tokens, cache, **with_states)
    assert read[0] == 0
