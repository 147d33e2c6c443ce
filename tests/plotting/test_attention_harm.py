"""The figure of long states and long attention apart draws what was measured, on one scale for all models."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.attention.figure import CASES, attention_harm_figure
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.plotting.images import save_png
from tests.diagnosis.diagnoses import hybrid, states


def without_intervals(found: StateDiagnosis) -> StateDiagnosis:
    """Only the last border, of a single text."""
    assert found.attention is not None
    last = {name: (Estimate(getattr(found.attention, name)[-1].mean, None, None),) for name in CASES}
    return replace(found, attention=replace(found.attention, borders=(512,), **last))


def test_each_model_with_attention_has_a_panel_with_three_lines(tmp_path: Path) -> None:
    figure = attention_harm_figure({"one": hybrid(), "none": states({}), "two": without_intervals(hybrid())}, "byte")
    one, two = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["one", "two"]
    colors = list(CASES.values())
    curves = {line.get_color(): line.get_xydata() for line in one.get_lines() if line.get_color() in colors}
    np.testing.assert_allclose(curves[CASES["recurrent"]], [[16, 0.0], [64, 0.5], [512, 1.2]])
    np.testing.assert_allclose(curves[CASES["attention"]], [[16, 0.3], [64, 0.0], [512, 0.02]])
    assert (len(one.collections), len(two.collections)) == (3, 0)
    assert [line.get_marker() for line in two.get_lines() if line.get_color() == CASES["attention"]] == ["o"]
    assert (one.get_ylim(), one.get_xlim()) == (two.get_ylim(), two.get_xlim())
    assert {"states", "attention", "both"} <= {text.get_text() for text in one.texts}
    save_png(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
