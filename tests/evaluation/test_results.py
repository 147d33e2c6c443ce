"""Results in files, by their exact fields, and what a result shows of itself."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

from hf_recurrent_lengthgen.checkpoints.records import Settings
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import Value, from_json, from_plain, to_json, to_plain
from hf_recurrent_lengthgen.evaluation.results import (
    Curve,
    DataRecord,
    DataSource,
    Estimate,
    ForgettingRule,
    TrainingRecord,
)
from hf_recurrent_lengthgen.metrics.context_harm.result import (
    ComparedModel,
    Comparison,
    ContextHarm,
    EvaluationResult,
    InWindow,
    LengthVerdict,
    TwoResolutions,
)
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from tests.metrics.conftest import compared
from tests.metrics.test_retrieval_figures import RESULT
from tests.metrics.test_states_figures import diagnosis


@pytest.fixture
def result() -> EvaluationResult:
    curve = Curve((0, 1, 8), (2.5, 0.1), (2.0, 0.05), (3.0, 0.15))
    one = Curve((0, 8), (1 / 3,), None, None)
    return EvaluationResult(
        model='base "Ü" <1>',
        weights="9f",
        training_length=4,
        evaluated_length=8,
        sequences=2,
        confidence=0.95,
        data=DataRecord(DataSource("made up"), "0" * 64, "byte"),
        position_wise=TwoResolutions(curve, one),
        harm=ContextHarm(TwoResolutions(curve, one), (4, 8), Estimate(0.5, 0.4, 0.6), 0.05, None),
        in_window=InWindow(curve, Estimate(2.0, None, None), Estimate(1.0, 0.5, 1.5), (0, 2), (2, 4), 3),
        verdict=LengthVerdict((1, 8), 0.1, curve, 0.01, 8, None),
        device="cpu",
        versions={"torch": "2"},
        command="lengthgen demo",
        seed=0,
        wall_seconds=1.5,
    )


@pytest.fixture
def comparison(result: EvaluationResult) -> Comparison:
    other = dataclasses.replace(result, model="intervention", seed=3)
    training = TrainingRecord(("state passing",), 600, 55.0, 1.25, 0.001)
    return Comparison("Demo", (ComparedModel("base", result, None), ComparedModel("intervention", other, training)))


def edited(text: str, change: Any) -> str:
    plain = json.loads(text)
    change(plain)
    return json.dumps(plain)


def test_numbers_stand_on_one_line_and_texts_as_they_are(result: EvaluationResult) -> None:
    text = to_json(dataclasses.replace(result, model="[\n 1,\n 2\n]"))
    assert '"edges": [0, 1, 8]' in text
    assert '"model": "[\\n 1,\\n 2\\n]"' in text
    assert from_json(text, EvaluationResult).model == "[\n 1,\n 2\n]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(extra=1), r"^extra: There is no such field, got 1"),
        (lambda d: d.pop("seed"), r"^seed: Field required$"),
        (lambda d: d["harm"]["last"].pop("low"), r"harm\.last\.low: Field required"),
        (lambda d: d.update(seed=True), r"seed: Input should be a valid integer, got True"),
        (lambda d: d.update(confidence=math.nan), r"confidence: Input should be a finite number, got nan"),
        (
            lambda d: d["harm"]["curves"]["fine"]["mean"].__setitem__(1, math.inf),
            r"harm\.curves\.fine\.mean\[1\]: Input should be a finite number, got inf",
        ),
        (lambda d: d["position_wise"]["fine"]["mean"].append(1.0), r"position_wise\.fine: A curve needs"),
        (lambda d: d["position_wise"]["fine"].update(edges=[0, 8, 1]), r"position_wise\.fine: .*strictly increasing"),
        (lambda d: d["position_wise"]["fine"].update(low=None), r"position_wise\.fine: .*or in mean alone"),
        (lambda d: d.update(seed="0", extra=1), r"seed: .*; extra: "),
        (lambda d: d.pop("schema_version"), r"schema version None"),
        (lambda d: d.update(schema_version=7, later=1), r"schema version 7, .* reads up to 6: update hf_"),
        (lambda d: d.update(kind="comparison"), r"kind 'evaluation', got 'comparison'"),
    ],
)
def test_documents_that_are_not_exactly_right_are_refused(result: EvaluationResult, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(edited(to_json(result), change), EvaluationResult)


def test_a_file_of_an_earlier_version_lacks_what_came_later(result: EvaluationResult) -> None:
    rule = ForgettingRule(window=4, decay_scale=(0.5, 1.25))
    later = dataclasses.replace(result, forgetting=rule, mean_perplexity=result.position_wise)
    assert from_json(to_json(later), EvaluationResult) == later

    def earlier(plain: dict[str, Any]) -> None:
        plain["schema_version"] -= 1
        del plain["forgetting"], plain["mean_perplexity"]

    assert from_json(edited(to_json(later), earlier), EvaluationResult) == result


FIRST = Path(__file__).parent / "records" / "comparison-3.json"


def test_the_first_file_is_read_for_ever() -> None:
    found = read_result(FIRST, Comparison)
    assert [model.role for model in found.models] == ["base", "intervention"]
    assert found.models[1].training == TrainingRecord(("state passing",), 600, 55.0, 1.25, 0.001, 0.1)
    assert found.models[1].evaluation.data.source == DataSource("made up", "validation", "texts of 8 bytes", "2 texts")


def test_an_option_of_any_type_is_read_as_it_was_written() -> None:
    values: dict[str, Value] = {"a": True, "b": 1, "c": 1.0, "d": "x", "e": None, "f": (1, 2.5, "y"), "g": {"h": 0.5}}
    settings = Settings(0, 3, 0.1, "cosine", "sgd", 0.0, None, "float32", 0, method=values)
    again = from_plain(to_plain(settings), Settings)
    assert again == settings
    assert [type(value) for value in again.method.values()] == [type(value) for value in values.values()]
    with pytest.raises(ValueError, match=r"method\.c.*finite number"):
        to_plain(dataclasses.replace(settings, method={"c": math.nan}))


def test_a_wrong_value_inside_a_comparison_is_named_by_its_path(comparison: Comparison) -> None:
    text = to_json(comparison)
    with pytest.raises(
        ValueError, match=r"models\[1\]\.role: .*'base', 'intervention', 'control' or 'other', got 'cure'"
    ):
        from_json(edited(text, lambda d: d["models"][1].update(role="cure")), Comparison)
    older = from_json(edited(text, lambda d: d["models"][1].update(role="cured")), Comparison)
    assert older.models[1].role == "intervention"
    with pytest.raises(ValueError, match="at least one model"):
        from_json(edited(text, lambda d: d.update(models=[])), Comparison)


def test_values_that_could_not_be_read_back_are_not_written(result: EvaluationResult) -> None:
    with pytest.raises(ValueError, match=r"wall_seconds: Input should be a finite number, got nan"):
        to_json(dataclasses.replace(result, wall_seconds=math.nan))
    with pytest.raises(ValueError, match=r"seed: Input should be a valid integer, got '1'"):
        to_json(dataclasses.replace(result, seed="1"))  # type: ignore[arg-type]


def test_a_comparison_needs_different_labels_and_the_same_data(comparison: Comparison) -> None:
    base, intervention = comparison.models
    with pytest.raises(ValueError, match="different labels"):
        Comparison("", (base, base))
    elsewhere = dataclasses.replace(intervention.evaluation, data=DataRecord(DataSource("made up"), "1" * 64, "byte"))
    with pytest.raises(ValueError, match="and the same data digest"):
        Comparison("", (base, ComparedModel("intervention", elsewhere, None)))


def test_files_are_replaced_whole_and_errors_name_them(tmp_path: Path, result: EvaluationResult) -> None:
    path = tmp_path / "result.json"
    write_result(path, result)
    assert read_result(path, EvaluationResult) == result
    with pytest.raises(ValueError, match="wall_seconds"):
        write_result(path, dataclasses.replace(result, wall_seconds=math.inf))
    assert read_result(path, EvaluationResult) == result
    assert os.listdir(tmp_path) == ["result.json"]
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=r"result\.json: The text is not JSON .*truncated"):
        read_result(path, EvaluationResult)


EVALUATION: Any = compared("base", "a/base", 1.4).evaluation
STATES: StateDiagnosis = diagnosis([[0.0, 0.8], [1.0] * 40], 1.0)


def test_a_result_is_shown_by_its_fields_on_one_screen() -> None:
    text = repr(EVALUATION)
    lines = text.splitlines()
    assert lines[0] == "EvaluationResult: help(EvaluationResult) says what the fields are"
    assert "  model             'a/base'" in lines
    assert any(line.startswith("  harm              ContextHarm(curves=") for line in lines)
    for result in (EVALUATION, STATES, RESULT, Comparison("t", (compared("base", "a", 1.0),))):
        assert len(repr(result).splitlines()) <= 30
        assert max(map(len, repr(result).splitlines())) <= 120


@pytest.mark.parametrize("result", [EVALUATION, RESULT, Comparison("t", (compared("base", "<a>", 1.0),))])
def test_notebooks_show_the_figure_and_the_fields(result: Any) -> None:
    shown = minidom.parseString(f'<all xmlns:xlink="svg">{result._repr_html_()}</all>')
    [svg] = shown.getElementsByTagName("svg")
    labels = [text.firstChild.data for text in svg.getElementsByTagName("text")]
    assert (result.models[0].evaluation.model if isinstance(result, Comparison) else result.model) in labels
    assert repr(result) == shown.getElementsByTagName("pre")[0].firstChild.data
    assert not hasattr(STATES, "_repr_html_")
