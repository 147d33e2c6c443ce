"""Figures of retrieval show the numbers of the results."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.metrics.retrieval.figure import heat_map_figure, mistakes_figure, retrieval_accuracy_figure
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalResult
from hf_recurrent_lengthgen.plotting.images import inline_svg
from hf_recurrent_lengthgen.plotting.style import DARK

CELLS = (
    (RetrievalCell(10, 10, 400), RetrievalCell(3, 10, 900), RetrievalCell(0, 0, None)),
    (RetrievalCell(10, 10, 20), RetrievalCell(8, 10, 20), RetrievalCell(1, 10, 20)),
)
RESULT = RetrievalResult(
    model="curly $x^2$",
    weights="w",
    training_length=512,
    task="passkey",
    style="pass key",
    shots=0,
    rows=("0 %", "100 %"),
    depths=(0.0, 1.0),
    lengths=(512, 1024, 131072),
    cells=CELLS,
    confidence=0.95,
    data=DataRecord(DataSource("text"), "0", "byte"),
    device="cpu",
    versions={},
    command="",
    seed=0,
    wall_seconds=1.0,
)
BABILONG = replace(RESULT, model="other", task="babilong", rows=("qa1", "qa2"), depths=None, training_length=None)


def words(figure: Figure) -> list[str]:
    return [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", inline_svg(figure, "f", "d", {})) if text]


def heights(line: Line2D) -> list[float]:
    return list(np.asarray(line.get_ydata()))


def test_cells_show_percentages_and_where_training_ends() -> None:
    figure = heat_map_figure([RESULT, replace(RESULT, model="other", training_length=None)])
    shown = words(figure)
    assert [shown.count(text) for text in ("100", "30", "-", "80", "10")] == [4, 2, 2, 2, 2]
    assert "curly $x^2$, trained on 512" in shown
    assert "other" in shown
    assert [shown.count(text) for text in ("512", "1k", "128k", "0 %", "100 %")] == [2] * 5
    first, second, _ = figure.axes
    assert {line.get_xdata()[0] for line in first.lines} == {1}  # type: ignore[index]
    assert not second.lines
    drawn: Any = first.collections[0].get_array()
    assert np.ma.filled(drawn, -1).tolist() == [[1, 0.3, -1], [1, 0.8, 0.1]]
    assert heat_map_figure([BABILONG]).axes[0].get_ylabel() == "Task"


def test_accuracy_against_length_has_intervals_and_the_training_length() -> None:
    figure = retrieval_accuracy_figure([RESULT, replace(RESULT, model="other")])
    (axes,) = figure.axes
    assert [heights(line) for line in axes.lines if line.get_marker() == "o"] == [[1, 0.55, 0.1]] * 2
    assert len(axes.collections) == 2
    assert "trained on 512" in words(figure)
    assert retrieval_accuracy_figure([BABILONG]).axes[0].get_title("left") == "BABILong: right answers (dots: 95 %)"


def test_bars_show_what_was_said() -> None:
    kinds = {"another key": 4, "earlier value": 1}
    cells = (
        (RetrievalCell(10, 10, 9, dict.fromkeys(kinds, 0)), RetrievalCell(3, 10, 9, kinds), RetrievalCell(0, 0, 0)),
    )
    keys = replace(RESULT, task="keys", rows=("0 %",), depths=(0.0,), cells=cells, lengths=(512, 1024, 2048))
    figure = mistakes_figure([keys, replace(keys, model="other")])
    for axes in figure.axes:
        bars = [[(bar.get_y(), bar.get_height()) for bar in group] for group in axes.containers]  # type: ignore[attr-defined]
        assert [group[0] for group in bars] == [(0, 100), (100, 0), (100, 0), (100, 0)]
        assert [group[1] for group in bars] == [(0, 30), (30, 40), (70, 10), (80, 20)]
        assert [group[2] for group in bars] == [(0, 0)] * 4
    shown = words(figure)
    assert [shown.count(kind) for kind in ("right", "another key", "earlier value", "other")] == [2] * 4
    assert heat_map_figure([keys]).texts[0].get_text().startswith("Keys in text: right answers")


def test_figures_follow_a_dark_page() -> None:
    plain = inline_svg(heat_map_figure([RESULT]), "f", "d", {})
    dark = inline_svg(heat_map_figure([RESULT]), "f", "d", DARK)
    for color in ("#ffffff", "#101418"):  # numbers stay as they are on their cells
        assert plain.count(color) == dark.count(color) > 0
