"""Figures of states: what they say, on diagnoses made by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.states.figure import (
    CASES,
    DRIFT,
    STEADY,
    attention_harm_figure,
    distance_map_figure,
    patching_figure,
    retention_figure,
    state_inputs_figure,
    state_mean_figure,
    state_std_figure,
)
from hf_recurrent_lengthgen.metrics.states.result import (
    ConvStates,
    HeadPatching,
    HeadStates,
    PatchedHeads,
    StateDiagnosis,
)
from hf_recurrent_lengthgen.plotting.style import INK, MUTED
from tests.metrics.diagnoses import hybrid

POSITIONS = (8, 16, 32, 48, 64, 128, 256, 512)
Pair = dict[str, StateDiagnosis]


def head(layer: int, number: int, growth: float) -> HeadStates:
    """Its std is 3 at 64 and grows with a power of the position, as its mean, -6 there, and its largest element."""
    std = tuple(3 * (position / 64) ** growth for position in POSITIONS)
    distance = tuple(abs(value / 3 - 1) for value in std)
    retention = tuple(-position / (100 + 1000 * growth) for position in POSITIONS)
    drifts = growth > 0.5
    leaves_at = 256 if drifts else None
    mean, largest = (tuple(factor * value for value in std) for factor in (-2, 5))
    inputs = {"key": (1.0, 2.0) * 4} if layer else {}
    moments: Any = (mean, largest, inputs)
    return HeadStates(layer, "head", number, std, distance, distance[-1], drifts, leaves_at, retention, *moments)


def estimate(value: float) -> Estimate:
    return Estimate(value, value - 0.1, value + 0.1)


def diagnosis(growths: list[list[float]], harm: float) -> StateDiagnosis:
    """The whole state grows like a square root."""
    heads = tuple(head(layer, n, growth) for layer, own in enumerate(growths) for n, growth in enumerate(own))
    groups = (
        PatchedHeads("the 2 that drift", ((0, 1), (1, 0)), estimate(harm), estimate(0.9 * harm)),
        PatchedHeads("layer 1, head 0", ((1, 0),), estimate(-0.2 * harm), estimate(0.6 * harm)),
    )
    patching = HeadPatching(480, 32, 32, estimate(harm), groups)
    return StateDiagnosis(64, POSITIONS, 8, 0.95, tuple(5 * position**0.5 for position in POSITIONS), heads, patching)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return {
        "base": diagnosis([[0.0, 0.8], [1.0, 0.0]], 1.0),
        "state passing": diagnosis([[0.1, 0.0], [0.0, 0.0]], 0.0),
    }


def texts(figure: Figure) -> list[str]:
    written = [text.get_text() for axes in figure.axes for text in axes.texts]
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "right")]
    return written + titles + [text.get_text() for text in figure.texts]


def colors_of(figure: Figure, panel: int) -> list[Any]:
    return [line.get_color() for line in figure.axes[panel].get_lines() if line.get_color() in (DRIFT, STEADY)]


@pytest.mark.parametrize("figure_of", [state_std_figure, retention_figure, state_mean_figure])
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
    axes = state_std_figure(pair).axes[0]
    lines = [line for line in axes.get_lines() if line.get_color() == DRIFT]
    np.testing.assert_allclose(lines[0].get_ydata(), np.array(POSITIONS) / 64)
    (whole,) = (line for line in axes.get_lines() if line.get_color() == INK and len(line.get_xdata()) == 8)
    np.testing.assert_allclose(whole.get_ydata(), np.sqrt(np.array(POSITIONS) / 64))
    lines = [line for line in retention_figure(pair).axes[0].get_lines() if line.get_color() == DRIFT]
    np.testing.assert_allclose(lines[0].get_ydata(), np.exp(-np.array(POSITIONS) / 1100))


def test_means_are_in_standard_deviations_and_dead_heads_have_none(pair: Pair) -> None:
    dead = dataclasses.replace(pair["base"].heads[0], std=(0.0,) * 8, mean=(0.0,) * 8)
    figure = state_mean_figure({"a": dataclasses.replace(pair["base"], heads=(dead, *pair["base"].heads[1:]))})
    lines = [line for line in figure.axes[0].get_lines() if line.get_color() == DRIFT]
    np.testing.assert_allclose(lines[0].get_ydata(), -2 * np.array(POSITIONS) / 64)
    assert figure.axes[0].get_ylim() == pytest.approx((-1.3 * 16, 1.3))


def test_inputs_have_a_panel_for_each_that_is_known(pair: Pair) -> None:
    figure = state_inputs_figure({"a": pair["base"]})
    assert [axes.get_title("left") for axes in figure.axes] == ["a: largest element", "a: keys"]
    assert [len(colors_of(figure, panel)) for panel in (0, 1)] == [4, 2]
    (line,) = (line for line in figure.axes[1].get_lines() if line.get_color() == DRIFT)
    np.testing.assert_allclose(line.get_ydata(), [1, 2] * 4)


def test_convolutions_are_dotted(pair: Pair) -> None:
    conv = (ConvStates(0, "x", (0.0,) * 8, (2.0, 6.0) * 4),)
    figure = state_std_figure({"a": dataclasses.replace(pair["base"], conv=conv)})
    (line,) = (
        line for line in figure.axes[0].get_lines() if line.get_color() == MUTED and line.get_linestyle() == ":"
    )
    np.testing.assert_allclose(line.get_ydata(), [1, 3] * 4)
    assert any("Dotted: convolutions" in text for text in texts(figure))


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
    assert {"total: 1.00", "total: 0.00"} <= set(texts(figure))
    assert any("nats per byte" in text for text in texts(figure))
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_each_hybrid_has_a_panel_with_three_lines() -> None:
    made_up: Any = hybrid()
    last = {name: (Estimate(getattr(made_up.attention, name)[-1].mean, None, None),) for name in CASES}
    short = dataclasses.replace(made_up, attention=dataclasses.replace(made_up.attention, borders=(512,), **last))
    figure = attention_harm_figure({"one": made_up, "two": short}, "byte")
    one, two = figure.axes
    colors = {name: color for name, (_, color) in CASES.items()}
    curves = {line.get_color(): line.get_xydata() for line in one.get_lines() if line.get_color() in colors.values()}
    np.testing.assert_allclose(curves[colors["recurrent"]], [[16, 0.0], [64, 0.5], [512, 1.2]])
    np.testing.assert_allclose(curves[colors["attention"]], [[16, 0.3], [64, 0.0], [512, 0.02]])
    assert (len(one.collections), len(two.collections)) == (3, 0)
    assert [line.get_marker() for line in two.get_lines() if line.get_color() == colors["attention"]] == ["o"]
    assert (one.get_ylim(), one.get_xlim()) == (two.get_ylim(), two.get_xlim())
    assert {"states", "attention", "both"} <= {text.get_text() for text in one.texts}
