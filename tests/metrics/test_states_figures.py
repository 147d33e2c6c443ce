"""Figures of states: what they say, on diagnoses made by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.states.figure import (
    DRIFT,
    STEADY,
    conv_std_figure,
    distance_map_figure,
    inputs_figure,
    outlier_figure,
    patching_figure,
    retention_figure,
    state_std_figure,
    whole_std_figure,
)
from hf_recurrent_lengthgen.metrics.states.result import (
    ConvStates,
    Extremes,
    HeadPatching,
    HeadStates,
    LayerStates,
    PatchedHeads,
    RecurrenceInputs,
    StateDiagnosis,
)
from hf_recurrent_lengthgen.plotting.images import inline_svg, save_png, save_svg
from hf_recurrent_lengthgen.plotting.style import DARK, INK

POSITIONS = (8, 16, 32, 48, 64, 128, 256, 512)
FIGURES = [state_std_figure, retention_figure, conv_std_figure, distance_map_figure, patching_figure]
FIGURES += [whole_std_figure, outlier_figure, inputs_figure]


def head(number: int, growth: float) -> HeadStates:
    """Its std is 3 at 64 and grows with a power of the position."""
    std = tuple(3 * (position / 64) ** growth for position in POSITIONS)
    distance = tuple(abs(value / 3 - 1) for value in std)
    retention = tuple(-position / (100 + 1000 * growth) for position in POSITIONS)
    inputs = RecurrenceInputs(retention, retention, std, std, std)
    zeros, drifts = (0.0,) * len(POSITIONS), growth > 0.5
    extremes = Extremes(std, (0,) * len(POSITIONS))
    leaves = 256 if drifts else None
    return HeadStates(number, std, distance, distance[-1], 0.2, drifts, leaves, growth, zeros, extremes, inputs)


Pair = dict[str, StateDiagnosis]


def diagnosis(growths: list[list[float]], harm: float) -> StateDiagnosis:
    zeros = (0.0,) * len(POSITIONS)
    conv = (ConvStates("x", zeros, (2.0,) * len(POSITIONS), Extremes(zeros, (0,) * len(POSITIONS))),)
    layers = tuple(
        LayerStates(layer, "head", (8, 8), zeros, tuple(head(n, growth) for n, growth in enumerate(found)), conv)
        for layer, found in enumerate(growths)
    )

    def estimate(value: float) -> Estimate:
        return Estimate(value, value - 0.1, value + 0.1)

    groups = (
        PatchedHeads("the 2 that drift", ((0, 1), (1, 0)), estimate(harm), estimate(0.9 * harm)),
        PatchedHeads("layer 1, head 0", ((1, 0),), estimate(-0.2 * harm), estimate(0.6 * harm)),
    )
    patching = HeadPatching(480, 32, 32, estimate(2 + harm), estimate(2), estimate(harm), groups)
    return StateDiagnosis(64, POSITIONS, 8, 0.95, 1.0, zeros, layers, patching)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return {
        "base": diagnosis([[0.0, 0.8], [1.0, 0.0]], 1.0),
        "state passing": diagnosis([[0.1, 0.0], [0.0, 0.0]], 0.0),
    }


def texts(figure: Figure) -> list[str]:
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "right")]
    return [text for text in [*found, *titles, *(text.get_text() for text in figure.texts)] if text]


def colors_of(figure: Figure, panel: int) -> list[str]:
    lines = figure.axes[panel].get_lines()
    return [str(line.get_color()) for line in lines if line.get_color() in (DRIFT, STEADY)]


@pytest.mark.parametrize("figure_of", [state_std_figure, retention_figure])
def test_drifting_heads_are_orange_and_named(pair: Pair, figure_of: Any) -> None:
    figure = figure_of(pair)
    assert colors_of(figure, 0) == [STEADY, STEADY, DRIFT, DRIFT]
    assert colors_of(figure, 1) == [STEADY] * 4
    assert {"base", "state passing", "L1 H0", "L0 H1", "2 steady", "none drifts"} <= set(texts(figure))
    assert not {"L0 H0", "L1 H1"} & set(texts(figure))
    assert any("trained on 64" in text for text in texts(figure))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == (8, 512)


def test_lines_are_the_ratio_to_the_training_length(pair: Pair) -> None:
    lines = [line for line in state_std_figure(pair).axes[0].get_lines() if line.get_color() == DRIFT]
    np.testing.assert_allclose(lines[0].get_ydata(), np.array(POSITIONS) / 64)
    lines = [line for line in retention_figure(pair).axes[0].get_lines() if line.get_color() == DRIFT]
    np.testing.assert_allclose(lines[0].get_ydata(), np.exp(-np.array(POSITIONS) / 1100))
    lines = [line for line in conv_std_figure(pair).axes[1].get_lines() if line.get_color() == STEADY]
    assert len(lines) == 2
    np.testing.assert_allclose(lines[0].get_ydata(), 1)


def test_the_whole_state_is_drawn_over_its_layers(pair: Pair) -> None:
    growing = tuple(5.0 * position / 64 for position in POSITIONS)
    layers = [
        dataclasses.replace(layer, std=std)
        for layer, std in zip(pair["base"].layers, (growing, (2.0,) * len(POSITIONS)), strict=True)
    ]
    states = dataclasses.replace(pair["base"], std=growing, layers=tuple(layers))
    axes = whole_std_figure({"base": states}).axes[0]
    lines = [line for line in axes.get_lines() if line.get_color() in (INK, STEADY) and len(line.get_xdata()) == 8]
    assert [line.get_color() for line in lines] == [STEADY, STEADY, INK]
    for line, expected in zip(lines, (np.array(POSITIONS) / 64, 1, np.array(POSITIONS) / 64), strict=True):
        np.testing.assert_allclose(line.get_ydata(), expected)
    assert "40" in [text.get_text() for text in axes.texts]  # 5 x 512 / 64


def test_outliers_are_in_standard_deviations_of_their_head(pair: Pair) -> None:
    layer = pair["base"].layers[0]
    first = dataclasses.replace(
        layer.heads[0],
        mean=(1.0,) * len(POSITIONS),
        std=(2.0,) * len(POSITIONS),
        extremes=Extremes((-19.0,) * len(POSITIONS), (0,) * len(POSITIONS)),
    )
    second = dataclasses.replace(layer.heads[1], extremes=None)
    states = dataclasses.replace(pair["base"], layers=(dataclasses.replace(layer, heads=(first, second)),))
    figure = outlier_figure({"base": states})
    assert colors_of(figure, 0) == [STEADY]  # the head without details is left out
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_color() == STEADY)
    np.testing.assert_allclose(line.get_ydata(), 10)


def test_inputs_have_a_panel_for_each_quantity_that_there_is(pair: Pair) -> None:
    def without_steps(states: StateDiagnosis) -> StateDiagnosis:
        layers = []
        for layer in states.layers:
            heads = [
                dataclasses.replace(found, inputs=found.inputs and dataclasses.replace(found.inputs, step=None))
                for found in layer.heads
            ]
            layers.append(dataclasses.replace(layer, heads=tuple(heads)))
        return dataclasses.replace(states, layers=tuple(layers))

    figure = inputs_figure({"a": pair["base"], "b": without_steps(pair["base"])})
    titles = ["a, step size", "a, keys (B)", "a, values (x)", "b, keys (B)", "b, values (x)"]
    assert [axes.get_title("left") for axes in figure.axes] == titles
    lines = [line for line in figure.axes[4].get_lines() if line.get_color() == DRIFT]
    np.testing.assert_allclose(lines[0].get_ydata(), np.array(POSITIONS) / 64)


def test_many_heads_are_cut_down_and_counted() -> None:
    many = diagnosis([[1.0] * 60, [0.0] * 90], 1.0)
    figure = state_std_figure({"large": many})
    assert {"+54 more", "90 steady"} <= set(texts(figure))
    assert len(colors_of(figure, 0)) <= 80
    figure = distance_map_figure({"large": many})
    assert "and 126 nearer heads" in texts(figure)
    assert len(figure.axes[0].get_yticklabels()) == 24


def test_the_map_has_the_worst_heads_first(pair: Pair) -> None:
    figure = distance_map_figure(pair)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["L1 H0", "L0 H1", "L0 H0", "L1 H1"]
    mesh: Any = figure.axes[0].collections[0]
    values = mesh.get_array().reshape(4, len(POSITIONS))
    np.testing.assert_allclose(values[0, -1], np.log10(7))
    np.testing.assert_allclose(values[2:], -1)  # no distance at all
    assert mesh.norm.vmax == figure.axes[1].collections[0].norm.vmax


def test_bars_are_the_harm_that_comes_and_goes(pair: Pair) -> None:
    figure = patching_figure(pair, "byte")
    widths = [bar.get_width() for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    np.testing.assert_allclose(widths, [0.9, 0.6, 1.0, -0.2])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["the 2 that drift", "layer 1, head 0"]
    assert {"harm of all: 1.00", "harm of all: 0.00"} <= set(texts(figure))
    assert any("nats per byte" in text for text in texts(figure))
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("figure_of", FIGURES)
def test_figures_can_be_saved(pair: Pair, figure_of: Any, tmp_path: Path) -> None:
    figure = figure_of(pair)
    save_png(figure, tmp_path / "figure.png")
    save_svg(figure, tmp_path / "figure.svg")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    svg = inline_svg(figure, "states", "what it shows", {color: f"var({color})" for color in DARK})
    assert svg.startswith("<svg")
    assert "var(" in svg
