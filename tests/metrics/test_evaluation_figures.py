import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.metrics.context_harm.figure import (
    context_harm_figure,
    in_window_figure,
    mean_perplexity_figure,
    position_wise_figure,
)
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison, TwoResolutions
from hf_recurrent_lengthgen.plotting.images import inline_svg, save_png, save_svg
from hf_recurrent_lengthgen.plotting.style import (
    DARK,
    ROLE_COLORS,
    new_axes,
    perplexity_axis,
    role_colors,
    short_number,
)

ModelOf = Callable[..., ComparedModel]
FIGURES: list[Callable[[Any], Figure]] = [
    *(position_wise_figure, mean_perplexity_figure, context_harm_figure, in_window_figure)
]


def test_lines_show_the_stored_means_and_bands_the_stored_intervals(demo: Comparison) -> None:
    axes = context_harm_figure(demo.models).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 6]
    stored = [model.evaluation.harm.curves.coarse for model in demo.models]
    for line, curve, band in zip(lines, stored, axes.collections, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), curve.mean)
        # Bins [16, 32) to [512, 1024): middles of 17..32 to 513..1024 tokens of context.
        np.testing.assert_allclose(np.asarray(line.get_xdata())[[0, -1]], [math.sqrt(17 * 32), math.sqrt(513 * 1024)])
        vertices = band.get_paths()[0].vertices
        assert (vertices[:, 1].min(), vertices[:, 1].max()) == pytest.approx((min(curve.low), max(curve.high)))


def test_perplexity_is_exp_of_the_mean_loss_or_the_mean_of_exp_on_a_logarithmic_axis(demo: Comparison) -> None:
    base = demo.models[0].evaluation
    for figure, mean, low in (
        (position_wise_figure, np.exp(base.position_wise.coarse.mean), np.exp(base.position_wise.coarse.low)),
        (mean_perplexity_figure, base.mean_perplexity.coarse.mean, base.mean_perplexity.coarse.low),
    ):
        axes = figure(demo.models).axes[0]
        assert axes.get_yscale() == "log"
        line, band = axes.lines[0], axes.collections[0].get_paths()[0].vertices
        np.testing.assert_allclose(line.get_ydata(), mean[-len(line.get_ydata()) :])
        assert band[:, 1].min() == pytest.approx(min(low[-len(line.get_ydata()) :]))
        assert "trained on 16" in [text.get_text() for text in axes.texts]


def test_an_axis_of_perplexity_does_not_go_below_1_and_an_older_result_has_none(demo: Comparison) -> None:
    model = demo.models[0]
    wide = replace(model.evaluation.mean_perplexity.coarse, low=(0.01,) * 11)
    of = replace(model.evaluation, mean_perplexity=TwoResolutions(wide, wide))
    assert mean_perplexity_figure([replace(model, evaluation=of)]).axes[0].get_ylim()[0] == 1
    older = replace(model, evaluation=replace(model.evaluation, mean_perplexity=None))
    with pytest.raises(ValueError, match=r"\['base'\] have no mean_perplexity, .*: evaluate them again"):
        mean_perplexity_figure([older, demo.models[1]])


@pytest.mark.parametrize("values", [(3.8, 4.5), (2.0, 9.0), (1.0, 1e12), (5.0, 5.0), (1.0, 1e130)])
def test_the_axis_of_perplexity_has_a_few_plain_numbers(values: tuple[float, float]) -> None:
    figure, axes = new_axes("perplexity")
    axes.plot([1, 2], values)
    perplexity_axis(axes)
    figure.draw_without_rendering()
    places = axes.yaxis.get_majorticklocs()
    assert 1 <= len(places) <= 9
    assert all(axes.get_ylim()[0] <= place <= axes.get_ylim()[1] for place in places)
    assert [float(text.get_text().replace(",", "")) for text in axes.get_yticklabels()] == pytest.approx(list(places))


def test_bins_out_of_sight_are_not_drawn(demo: Comparison) -> None:
    axes = position_wise_figure(demo.models).axes[0]  # trained on 16 tokens: from 2 on
    assert min(axes.lines[0].get_xdata()) == pytest.approx(math.sqrt(2 * 2))
    assert axes.get_xlim() == (2, 1024)


@pytest.mark.parametrize("figure_of", FIGURES)
def test_every_model_has_a_label_and_labels_do_not_overlap(
    model_of: ModelOf, figure_of: Callable[[Any], Figure]
) -> None:
    names = ["base", "a model with a long name, cut after three lines of text", "x_1 $\\alpha", "<b>&", "e", "f"]
    models = [model_of("other", name, 0.3) for name in names]
    figure = figure_of(models)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = [text for text in axes.texts if text.get_fontweight() == "bold"]
    assert {text.get_text().replace("\n", " ")[:9] for text in texts} == {name[:9] for name in names}
    boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.y0)
    for lower, upper in itertools.pairwise(boxes):
        assert upper.y0 >= lower.y1 - 2.5
    assert max(box.x1 for box in boxes) <= figure.bbox.x1
    assert min(box.y0 for box in boxes) >= 0


@pytest.mark.parametrize("figure_of", FIGURES)
def test_results_without_intervals_have_no_bands(model_of: ModelOf, figure_of: Callable[[Any], Figure]) -> None:
    assert not figure_of([model_of("base", "base", 1.0, width=None)]).axes[0].collections


def test_colors_differ_and_have_dark_partners(demo: Comparison) -> None:
    assert role_colors([model.role for model in demo.models]) == [
        ROLE_COLORS[role] for role in ("base", "intervention", "control")
    ]
    many = role_colors([*(model.role for model in demo.models), "base", "intervention", "other"])
    assert len(set(many)) == 6
    assert set(many) <= set(DARK)


def test_numbers_are_short_where_people_shorten_them() -> None:
    numbers = (1, 64, 1000, 1024, 1536, 131072, 2**20)
    assert list(map(short_number, numbers)) == ["1", "64", "1,000", "1k", "1,536", "128k", "1M"]


def test_pictures_are_saved_and_leave_no_trace_in_matplotlib(demo: Comparison, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_png(in_window_figure(demo.models), tmp_path / "a.png")
    save_svg(in_window_figure(demo.models), tmp_path / "a.svg")
    save_svg(in_window_figure(demo.models), tmp_path / "b.svg")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert matplotlib.image.imread(tmp_path / "a.png")[0, 0].tolist() == [1, 1, 1, 1]
    text = (tmp_path / "a.svg").read_text()
    assert ">state passing</text>" in text
    assert text == (tmp_path / "b.svg").read_text()
    assert dict(matplotlib.rcParams) == before


def test_inline_svg_has_its_own_ids_colors_and_description(demo: Comparison) -> None:
    svg = inline_svg(in_window_figure(demo.models), "one", 'a <b> & "c"', {"#d55e00": "var(--base)"})
    assert svg.startswith('<svg role="img" aria-label="a &lt;b&gt; &amp; &quot;c&quot;"')
    assert "http" not in svg
    assert "var(--base)" in svg
    assert "#d55e00" not in svg
    identifiers = {part.split('"')[0] for part in svg.split(' id="')[1:]}
    assert all(identifier.startswith("one-") for identifier in identifiers)
    references = [part.split(")")[0].split('"')[0] for part in svg.replace('href="#', "url(#").split("url(#")[1:]]
    assert references
    assert set(references) <= identifiers
