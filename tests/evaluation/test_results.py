import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.results import (
    ComparedModel,
    Comparison,
    ContextHarm,
    Curve,
    DataRecord,
    Estimate,
    EvaluationResult,
    InWindow,
    LengthVerdict,
    TrainingRecord,
    TwoResolutions,
)


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
        data=DataRecord("made up", "0" * 64, "byte"),
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
    other = dataclasses.replace(result, model="cured", seed=3)
    training = TrainingRecord("state passing", 600, 55.0, 1.25)
    return Comparison("Demo", (ComparedModel("base", result, None), ComparedModel("cured", other, training)))


def edited(text: str, change: Any) -> str:
    plain = json.loads(text)
    change(plain)
    return json.dumps(plain)


def test_numbers_stand_on_one_line_and_texts_as_they_are(result: EvaluationResult) -> None:
    text = to_json(dataclasses.replace(result, model="[\n 1,\n 2\n]"))
    assert '"edges": [0, 1, 8]' in text
    assert '"model": "[\\n 1,\\n 2\\n]"' in text
    assert from_json(text, EvaluationResult).model == "[\n 1,\n 2\n]"


def test_documents_survive_the_round_trip(result: EvaluationResult, comparison: Comparison) -> None:
    assert from_json(to_json(result), EvaluationResult) == result
    assert from_json(to_json(comparison), Comparison) == comparison


def test_the_json_says_what_it_is(comparison: Comparison) -> None:
    plain = json.loads(to_json(comparison))
    assert plain["kind"] == "comparison"
    assert plain["schema_version"] == 2
    assert plain["models"][1]["training"] == {
        "method": "state passing",
        "steps": 600,
        "seconds": 55.0,
        "loss": 1.25,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(extra=1), r"Unknown in the document: \['extra'\]"),
        (lambda d: d.pop("seed"), r"Missing in the document: \['seed'\]"),
        (lambda d: d["harm"]["last"].pop("low"), r"Missing in harm\.last: \['low'\]"),
        (lambda d: d["in_window"].update(los=1), r"Unknown in in_window: \['los'\]"),
        (lambda d: d.update(seed="0"), r"seed must be of type int, got '0'"),
        (lambda d: d.update(seed=True), r"seed must be of type int, got True"),
        (lambda d: d.update(seed=1.0), r"seed must be of type int, got 1\.0"),
        (lambda d: d.update(model=None), r"model must be of type str, got None"),
        (lambda d: d.update(confidence=None), r"confidence must be a finite number, got None"),
        (lambda d: d.update(confidence=math.nan), r"confidence must be a finite number, got nan"),
        (lambda d: d.update(confidence=10**400), r"confidence must be a finite number"),
        (lambda d: d["versions"].update(torch=2), r"versions\.torch must be of type str"),
        (lambda d: d["harm"].update(last_range=[1, 2, 3]), r"harm\.last_range must be of type tuple"),
        (
            lambda d: d["harm"]["curves"]["fine"]["mean"].__setitem__(1, math.inf),
            r"harm\.curves\.fine\.mean\[1\] must be a finite number, got inf",
        ),
        (
            lambda d: d["position_wise"]["fine"]["mean"].append(1.0),
            r"In position_wise\.fine: A curve with 2 bins has 3 values in 'mean'",
        ),
        (
            lambda d: d["position_wise"]["fine"].update(edges=[0, 8, 1]),
            r"In position_wise\.fine: .*strictly increasing",
        ),
        (lambda d: d["position_wise"]["fine"].update(low=None), r"In position_wise\.fine: .*both bounds"),
        (lambda d: d.update(data=[]), r"data must be of type DataRecord, got \[\]"),
        (lambda d: d.update(schema_version=1), r"schema version 1, this code reads 2: update"),
        (lambda d: d.update(schema_version=True), r"schema version True"),
        (lambda d: d.pop("schema_version"), r"schema version None"),
        (lambda d: d.update(kind="comparison"), r"kind 'evaluation', got 'comparison'"),
    ],
)
def test_documents_that_are_not_exactly_right_are_refused(result: EvaluationResult, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(edited(to_json(result), change), EvaluationResult)


def test_a_wrong_value_inside_a_comparison_is_named_by_its_path(comparison: Comparison) -> None:
    text = to_json(comparison)
    with pytest.raises(ValueError, match=r"models\[1\]\.role must be .*Literal.*got 'cure'"):
        from_json(edited(text, lambda d: d["models"][1].update(role="cure")), Comparison)
    with pytest.raises(ValueError, match="at least one model"):
        from_json(edited(text, lambda d: d.update(models=[])), Comparison)


def test_text_that_is_not_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        from_json('{"kind": "evalua', EvaluationResult)
    with pytest.raises(ValueError, match="got 'list'"):
        from_json("[]", EvaluationResult)
    with pytest.raises(ValueError, match=r"Doubled entries: \['a'\]"):
        from_json('{"a": 1, "a": 2}', EvaluationResult)


def test_values_that_could_not_be_read_back_are_not_written(result: EvaluationResult) -> None:
    with pytest.raises(ValueError, match=r"wall_seconds must be a finite number, got nan"):
        to_json(dataclasses.replace(result, wall_seconds=math.nan))
    with pytest.raises(ValueError, match=r"seed must be of type int, got '1'"):
        to_json(dataclasses.replace(result, seed="1"))  # type: ignore[arg-type]


def test_a_comparison_needs_different_labels_and_the_same_data(comparison: Comparison) -> None:
    base, cured = comparison.models
    with pytest.raises(ValueError, match="different labels"):
        Comparison("", (base, base))
    elsewhere = dataclasses.replace(cured.evaluation, data=DataRecord("made up", "1" * 64, "byte"))
    with pytest.raises(ValueError, match="share one data digest"):
        Comparison("", (base, ComparedModel("cured", elsewhere, None)))


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    curve = Curve((0, 1, 2), (0.0, 800.0), None, None)
    assert curve.perplexity == (1.0, math.inf)


def test_files_are_replaced_whole_and_errors_name_them(tmp_path: Path, result: EvaluationResult) -> None:
    path = tmp_path / "result.json"
    write_result(path, result)
    assert read_result(path, EvaluationResult) == result
    with pytest.raises(ValueError, match="wall_seconds"):
        write_result(path, dataclasses.replace(result, wall_seconds=math.inf))
    assert read_result(path, EvaluationResult) == result
    assert os.listdir(tmp_path) == ["result.json"]
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=r"result\.json: This is not JSON .*cut off"):
        read_result(path, EvaluationResult)
