"""Laws keep their bounds and say why they have no fit; their figure shows points, bounds, line and formula."""

import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.results import Estimate

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
