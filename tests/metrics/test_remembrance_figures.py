"""Figures of Effective Remembrance and of the prompt of one token."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate
from hf_recurrent_lengthgen.metrics.remembrance.measure import Remembrance
from hf_recurrent_lengthgen.metrics.remembrance.words import remembrance_figure
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt, constant_prompt_figure
from hf_recurrent_lengthgen.plotting.style import ROLE_COLORS

STARTS = (0, 16, 32, 48, 60, 63)


def remembrance(values: Sequence[float], width: float | None = 0.05) -> Remembrance:
    """At 64 tokens of a model trained on 16."""
    estimates = (
        Estimate(v, None if width is None else v - width, None if width is None else v + width) for v in values
    )
    return Remembrance(16, 64, 1 if width is None else 8, 0.95, STARTS, tuple(estimates))


def prompt(factor: float = 2.0) -> ConstantPrompt:
    curve = Curve((0, 1, 4, 16, 64), (9.0, 2.0, 1.0, 5.0), None, None)
    return ConstantPrompt(13, 16, 64, curve, 2.0, 5.0, factor, 16)


MODELS = {"base": remembrance([0, 0.3, 0.4, 0.5, 0.6, 0.7]), "cured": remembrance([0, 0, 0, 0.1, 0.2, 0.8])}


def test_lines_show_the_means_and_bands_the_intervals() -> None:
    axes = remembrance_figure(MODELS, ["base", "cured"]).axes[0]
    for line, band, result, role in zip(
        axes.lines, axes.collections, MODELS.values(), ("base", "cured"), strict=False
    ):
        assert list(line.get_xdata()) == [64 - start for start in STARTS]
        assert list(line.get_ydata()) == [value.mean for value in result.total_variation]
        assert line.get_color() == ROLE_COLORS[role]
        heights = band.get_paths()[0].vertices[:, 1]
        bounds = [bound for value in result.total_variation for bound in (value.low, value.high)]
        assert (heights.min(), heights.max()) == pytest.approx((min(bounds), max(bounds)))
    assert axes.get_ylim() == (0, 1)
    assert any(list(line.get_xdata()) == [16] * 2 for line in axes.lines)
    bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
    order = [text.get_text() for text in sorted(bold, key=lambda text: text.get_position()[1])]
    assert order == ["cured", "base"]


def test_each_distance_has_a_panel_with_the_models_that_have_it() -> None:
    base, cured = MODELS.values()
    base = replace(
        base, others={"cosine": tuple(Estimate(value.mean / 4, None, None) for value in base.total_variation)}
    )
    figure = remembrance_figure({"base": base, "cured": cured}, ["base", "cured"])
    variation, cosine = figure.axes
    assert [axes.get_title(loc="left").partition(" (")[2] for axes in figure.axes] == [
        "total variation)",
        "1 - cosine)",
    ]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "Number of last tokens kept"]
    curve, mark = cosine.lines
    assert list(curve.get_ydata()) == [value.mean for value in base.others["cosine"]]
    assert (curve.get_color(), list(mark.get_xdata())) == (ROLE_COLORS["base"], [16, 16])
    assert [list(line.get_ydata()) for line in variation.lines[:2]] == [
        [value.mean for value in result.total_variation] for result in MODELS.values()
    ]
    assert (variation.get_ylim(), cosine.get_ylim()) == ((0, 1), pytest.approx((0, 0.2)))


def test_one_sequence_has_no_band() -> None:
    axes = remembrance_figure({"one": remembrance([0, 0.1, 0.1, 0.2, 0.2, 0.3], None)}, ["other"]).axes[0]
    assert not axes.collections
    assert axes.get_ylim() == pytest.approx((0, 0.4))


def test_the_prompt_s_curve_and_its_limit() -> None:
    axes = constant_prompt_figure({"base": prompt(), "other": prompt(3.0)}, ["base", "other"]).axes[0]
    curve, limit = axes.lines[:2]
    np.testing.assert_allclose(curve.get_xdata(), [math.sqrt(2 * 4), math.sqrt(5 * 16), math.sqrt(17 * 64)])
    assert list(curve.get_ydata()) == [2.0, 1.0, 5.0]
    assert (list(limit.get_xdata()), list(limit.get_ydata())) == ([16, 64], [4, 4])
    assert list(axes.lines[3].get_ydata()) == [6, 6]
    assert "3x the highest inside" in [text.get_text() for text in axes.texts]
