"""Thresholds of length against the size of the state, and the law through them."""

import math
import textwrap

from law import Law
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation
from scaling_laws import LawFit, Threshold

from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, MUTED, ROLE_COLORS, new_axes

POINT, LINE = ROLE_COLORS["base"], ROLE_COLORS["intervention"]
ARROW = 16
"""Length of a bound's arrow in points."""
_TITLES = {
    "forget": "T_forget: least training length without failure",
    "recall": "T_recall: greatest length with accurate recall",
}
_UNITS = {1: "", 1000: "thousand ", 1_000_000: "million "}


def law_figure(law: Law) -> Figure:
    """Exact thresholds as points, bounds as open points with an arrow, the law with its interval, and its formula."""
    figure, axes = new_axes(_TITLES[law.quantity])
    axes.set_position((0.165, 0.165, 0.785, 0.6))
    axes.set_title(axes.get_title("left"), loc="left", fontsize=FONT_SIZE, color=INK, pad=36, parse_math=False)
    axes.text(
        0,
        1.04,
        _caption(law),
        transform=axes.transAxes,
        va="bottom",
        linespacing=1.3,
        parse_math=False,
        fontsize=FONT_SIZE - 1.5,
        color=MUTED,
    )
    heights: list[float] = [threshold.length for threshold in law.thresholds]
    if law.fit is not None:
        heights += law.fit.line.mean
        _draw_fit(axes, law.fit)
    low, high = min(0, *heights), max(heights)
    relations = "".join(threshold.relation for threshold in law.thresholds)
    room = 0.1 * (high - low)
    axes.set_xlim(0, 1.06 * max(threshold.size for threshold in law.thresholds))
    axes.set_ylim(low - (room if "<" in relations else 0), high + (2 * room if ">" in relations else room))
    for threshold in law.thresholds:
        _draw_threshold(axes, threshold)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value) if value >= low else ""))
    axes.set_xlabel("state size (elements)", fontsize=FONT_SIZE - 0.5, color=MUTED)
    axes.set_ylabel("length (tokens)", fontsize=FONT_SIZE - 0.5, color=MUTED)
    return figure


def _draw_fit(axes: Axes, fit: LawFit) -> None:
    line = fit.line
    axes.plot(line.sizes, line.mean, color=LINE, linewidth=2)
    if line.low is not None and line.high is not None:
        axes.fill_between(line.sizes, line.low, line.high, color=LINE, alpha=0.16, linewidth=0)


def _draw_threshold(axes: Axes, threshold: Threshold) -> None:
    """A point, with an arrow to where the threshold may be if its length is a bound."""
    exact, at = threshold.relation == "=", (threshold.size, threshold.length)
    axes.plot(*at, "o", color=POINT, markerfacecolor=POINT if exact else "none", markersize=6, clip_on=False, zorder=3)
    if not exact:
        up = ARROW / 72 * (1 if ">" in threshold.relation else -1)
        tip = axes.transData + ScaledTranslation(0, up, axes.figure.dpi_scale_trans)
        axes.annotate(
            "",
            at,
            xytext=at,
            xycoords=tip,
            textcoords="data",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-|>", "color": POINT, "linewidth": 1.4, "shrinkA": 3, "shrinkB": 0},
        )


def _caption(law: Law) -> str:
    """The formula, or that there is none, and what arrows are."""
    arrows = any(threshold.relation != "=" for threshold in law.thresholds)
    if law.fit is None:
        text = textwrap.shorten(f"No law fitted: {law.why_no_fit}", 110, placeholder=" …")
        return textwrap.fill(text, 60)
    values = {name: estimate.mean for name, estimate in law.fit.coefficients.items()}
    start = f"{'-' if values['b'] < 0 else '+'} {abs(values['b']):.3g}"
    formula = f"{values['a']:.3g} N" if law.fit.form == "linear" else f"{values['a']:.3g} ({values['c']:.4g}^N - 1)"
    r_squared = math.floor(1000 * law.fit.r_squared) / 1000  # 0.9996 is not 1
    return (
        f"T = {formula} {start}    R² = {r_squared:.3f}, {law.fit.points} points\n"
        f"N: {_unit(law.fit.size_unit)}elements, T: {_unit(law.fit.length_unit)}tokens"
        + ("; arrows: bounds" if arrows else "")
    )


def _unit(count: int) -> str:
    return _UNITS.get(count, f"{count:,} ")


def _short(value: float) -> str:
    """250, 1.5k, 12M: decimal units."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
