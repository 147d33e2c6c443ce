"""What a result shows of itself: a line per field, and every number in a table."""

import sys
from typing import Any
from xml.dom import minidom

import pytest

from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from tests.metrics.conftest import compared
from tests.metrics.test_retrieval_figures import RESULT
from tests.metrics.test_states_figures import diagnosis

EVALUATION: Any = compared("base", "a/base", 1.4).evaluation
STATES: StateDiagnosis = diagnosis([[0.0, 0.8], [1.0] * 40], 1.0)


def test_a_result_is_shown_by_its_fields_on_one_screen() -> None:
    text = repr(EVALUATION)
    lines = text.splitlines()
    assert lines[0] == (
        "EvaluationResult: .to_frame() has all numbers, help(EvaluationResult) says what the fields are"
    )
    assert "  model             'a/base'" in lines
    assert "  harm              ContextHarm: curves, last_range, last, threshold, harmful_from" in lines
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


def test_the_table_has_each_number_with_its_place() -> None:
    frame: Any = EVALUATION.to_frame()
    assert {*frame.model} == {"a/base"}
    (last,) = frame[frame.quantity == "harm.last"].to_dict("records")
    assert (last["value"], last["low"], last["high"]) == (1.4, 1.39, 1.41)
    harm = frame[frame.quantity == "harm.curves.coarse"]
    curve = EVALUATION.harm.curves.coarse
    assert [*zip(harm.start, harm.stop, harm.value, harm.low, strict=True)] == [
        *zip(curve.edges, curve.edges[1:], curve.mean, curve.low, strict=False)
    ]
    assert frame[frame.quantity == "training_length"].value.tolist() == [16]
    assert frame[frame.quantity == "harm.last_range"][["item", "value"]].values.tolist() == [
        ["0", 512.0],
        ["1", 1024.0],
    ]


def test_models_heads_and_cells_are_told_apart() -> None:
    both: Any = Comparison("t", (compared("base", "a", 1.0), compared("cured", "b", 0.0)))
    frame = both.to_frame()
    losses = frame[frame.quantity == "models.evaluation.harm.last"]
    assert dict(zip(losses.model, losses.value, strict=True)) == {"a": 1.0, "b": 0.0}
    states: Any = STATES
    heads = states.to_frame().query("quantity == 'heads.std'")
    assert heads.item.nunique() == len(heads) == 42 * 8
    cells: Any = RESULT
    assert cells.to_frame().query("quantity == 'cells.right' and item == '1.1'").value.tolist() == [8]


def test_without_pandas_the_table_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        EVALUATION.to_frame()
