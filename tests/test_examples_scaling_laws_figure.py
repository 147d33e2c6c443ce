"""Laws keep their bounds and say why they have no fit; their figure shows points, bounds, line and formula."""

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.plotting.images import inline_svg, save_png, save_svg
from hf_recurrent_lengthgen.plotting.style import DARK

sys.path.append(str(Path(__file__).parents[1] / "examples" / "scaling_laws"))
from law import Law, fit_law
from law_figure import law_figure
from scaling_laws import LawFit, LawLine, Relation, Threshold


def fit(band: bool = True, r_squared: float = 0.99961) -> LawFit:
    line = LawLine(
        *((1e6, 2e6, 4e6), (700.0, 5900.0, 16200.0)),
        *(((-300.0, 5000.0, 15000.0), (1700.0, 6800.0, 17400.0)) if band else (None, None)),
    )
    coefficients = {"a": Estimate(5.172, 5.1, 5.2), "b": Estimate(-4.469, -5, -4)}
    return LawFit("linear", 1_000_000, 1000, coefficients, r_squared, 3, 0.95, line)


def thresholds(*relations: Relation) -> tuple[Threshold, ...]:
    return tuple(Threshold(10**6 * 2**i, relation, 700 + 4000 * i, (512,)) for i, relation in enumerate(relations))


def caption(figure: Figure) -> str:
    (text,) = (text for text in figure.axes[0].texts if not isinstance(text, Annotation))
    return text.get_text()


def arrows(axes: Axes) -> list[float]:
    """Height of each arrow's tip over its point, in pixels."""
    axes.figure.canvas.draw()
    found = [text for text in axes.texts if isinstance(text, Annotation)]
    return [float(note.xycoords.transform(note.xy)[1] - axes.transData.transform(note.xyann)[1]) for note in found]  # type: ignore[union-attr]


def test_points_line_band_and_formula() -> None:
    figure = law_figure(Law("forget", "", thresholds("=", "=", "="), fit(), None))
    axes = figure.axes[0]
    line, *points = axes.get_lines()
    assert list(line.get_xdata()) == [1e6, 2e6, 4e6]
    assert list(line.get_ydata()) == [700, 5900, 16200]
    assert [(float(p.get_xdata()[0]), float(p.get_ydata()[0])) for p in points] == [  # type: ignore[index]
        (1e6, 700),
        (2e6, 4700),
        (4e6, 8700),
    ]
    assert all(point.get_markerfacecolor() == point.get_color() for point in points)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (-300, 17400)
    assert caption(figure) == (
        "T = 5.17 N - 4.47    R² = 0.999, 3 points\nN: million elements, T: thousand tokens"
    )  # an R^2 of 0.9996 is not 1.000
    assert axes.get_title("left") == "T_forget: shortest training length that holds (tokens)"
    assert arrows(axes) == []


def test_the_exponential_formula_and_other_units() -> None:
    coefficients = {
        "a": Estimate(4.756, None, None),
        "c": Estimate(1.365, None, None),
        "b": Estimate(0.742, None, None),
    }
    law = LawFit("exponential", 500, 1, coefficients, 1, 3, 0.95, fit(band=False).line)
    figure = law_figure(Law("recall", "", thresholds("=", "=", "="), law, None))
    assert caption(figure) == "T = 4.76 (1.365^N - 1) + 0.742    R² = 1.000, 3 points\nN: 500 elements, T: tokens"
    assert not figure.axes[0].collections
    assert figure.axes[0].get_title("left") == "T_recall: longest accurate recall (tokens)"


def test_bounds_are_open_points_with_arrows_to_where_the_threshold_may_be() -> None:
    figure = law_figure(Law("forget", "", thresholds("<=", "=", ">", "<", ">="), fit(), None))
    axes = figure.axes[0]
    points = axes.get_lines()[1:]
    assert [point.get_markerfacecolor() == "none" for point in points] == [True, False, True, True, True]
    length = 16 / 72 * figure.dpi
    assert arrows(axes) == pytest.approx([-length, length, -length, length])
    assert "arrows: bounds" in caption(figure)


def test_without_a_fit_it_says_why() -> None:
    figure = law_figure(Law("forget", "", thresholds(">", "="), None, "Only one point. " + "More sizes. " * 20))
    assert caption(figure).startswith("No law fitted: Only one point.")
    assert max(len(line) for line in caption(figure).splitlines()) <= 66
    assert len(caption(figure).splitlines()) == 2
    assert len(figure.axes[0].get_lines()) == 2


@pytest.mark.parametrize("relations", [("=", "="), ("<", "<"), (">", "=")])
def test_everything_is_inside_the_axes(relations: tuple[Relation, ...]) -> None:
    figure = law_figure(Law("forget", "", thresholds(*relations), fit(), None))
    figure.canvas.draw()
    axes = figure.axes[0]
    box = axes.get_window_extent()
    for text in axes.texts:
        if isinstance(text, Annotation):
            assert text.arrow_patch is not None
            extent = text.arrow_patch.get_window_extent()
            assert box.y0 - 3 <= extent.y0 <= extent.y1 <= box.y1 + 3
        else:
            extent = text.get_window_extent()
            assert 0 <= extent.x0 <= extent.x1 <= figure.bbox.width
            assert extent.y0 >= box.y1
    low, high = axes.get_ylim()
    assert np.all([low <= length <= high for line in axes.get_lines() for length in np.asarray(line.get_ydata())])


def test_saves_and_follows_dark_pages(tmp_path: Path) -> None:
    figure = law_figure(Law("recall", "", thresholds("=", ">="), fit(), None))
    save_png(figure, tmp_path / "law.png")
    save_svg(figure, tmp_path / "law.svg")
    assert (tmp_path / "law.png").stat().st_size > 5000
    svg = inline_svg(figure, "law", "a law", DARK)
    assert "#0072b2" not in svg
    assert DARK["#0072b2"] in svg


def forgotten(relations: str) -> list[Threshold]:
    return [
        Threshold(size, relation, round(1000 * (5.172 * size / 1e6 - 4.469)), (64,))  # type: ignore[arg-type]
        for size, relation in zip((10**6, 2 * 10**6, 3 * 10**6, 5 * 10**6), relations, strict=True)
    ]


def test_bounds_are_kept_but_not_fitted() -> None:
    law = fit_law("forget", [*forgotten("===="), Threshold(9 * 10**6, ">", 512, (256, 512))], "twice the loss")
    assert law.fit is not None
    assert law.fit.points == 4
    assert law.fit.form == "linear"
    assert [estimate.mean for estimate in law.fit.coefficients.values()] == pytest.approx([5.172, -4.469], rel=1e-3)
    assert law.fit.line.sizes[0] == 10**6
    assert law.fit.line.sizes[-1] == 5 * 10**6
    assert len(law.thresholds) == 5
    assert from_json(to_json(law), Law) == law


def test_says_why_there_is_no_fit() -> None:
    law = fit_law("forget", forgotten("<<=>"), "twice the loss")
    assert law.fit is None
    assert law.why_no_fit is not None
    assert "exact thresholds of at least 2 different state sizes, got 1" in law.why_no_fit
    assert from_json(to_json(law), Law) == law


def test_recall_is_exponential() -> None:
    sizes = [800_000, 1_600_000, 2_400_000, 4_800_000, 12_900_000, 19_300_000]
    lengths = [round(1000 * (4.756 * (1.365 ** (size / 1e6) - 1) - 0.742)) for size in sizes]
    points = [Threshold(size, "=", length, (64,)) for size, length in zip(sizes, lengths, strict=True)]
    fit = fit_law("recall", points, "accuracy").fit
    assert fit is not None
    assert fit.form == "exponential"
    assert [estimate.mean for estimate in fit.coefficients.values()] == pytest.approx([4.756, 1.365, -0.742], rel=2e-3)


def test_unusable_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one threshold"):
        fit_law("forget", [], "twice the loss")
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        fit_law("forget", forgotten("===="), "twice the loss", 95)
    with pytest.raises(ValueError, match="ascending order"):
        Threshold(1, "=", 5, (8, 4))
