"""The style of all figures: a color-blind safe palette, axes of token positions, labels beside lines."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate, Role

INK, MUTED, GRID = "#1b1f24", "#5b636d", "#d5d9de"
# Okabe and Ito's colors, and their partners on a dark ground. Roles also differ in line style.
ROLE_COLORS: dict[Role, str] = {"base": "#d55e00", "intervention": "#0072b2", "control": "#a8780f", "other": "#009e73"}
OTHER_COLORS = ("#aa4499", "#4d8f00", "#7a5cc8", "#5b636d")
LINE_COLORS = (ROLE_COLORS["intervention"], ROLE_COLORS["base"], ROLE_COLORS["other"], *OTHER_COLORS)
"""Colors of lines in turn where models have no roles."""
ROLE_LINES: dict[Role, Any] = {"base": "solid", "intervention": "solid", "control": (0, (5, 2)), "other": "solid"}
DARK = {
    INK: "#e8eaed",
    MUTED: "#a3abb5",
    GRID: "#3a414a",
    "#d55e00": "#ff8a3d",
    "#0072b2": "#56b4e9",
    "#a8780f": "#e3b341",
    "#009e73": "#3ecf9f",
    "#aa4499": "#e08bd0",
    "#4d8f00": "#9bd14b",
    "#7a5cc8": "#b9a3f5",
}
"""Light color -> dark color, for pages that follow the reader's scheme."""

FONT_SIZE = 10.5
LABEL_GAP = 1.25
"""Distance of the centers of one-line labels, in line heights."""


def role_colors(roles: Sequence[Role]) -> list[str]:
    """One color per model: the color of its role for the first model with it, then other colors in turn."""
    further = cycle(OTHER_COLORS)
    return [next(further) if role in roles[:index] else ROLE_COLORS[role] for index, role in enumerate(roles)]


def new_axes(y_label: str) -> tuple[Figure, Axes]:
    """A figure of the common shape: readable at phone width, with room for labels at the right."""
    figure, [axes] = stacked_axes([y_label])
    return figure, axes


def stacked_axes(y_labels: Sequence[str], height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """Axes of the common shape one below the other, `height` inches each."""
    total = height * len(y_labels)
    figure, panels = Figure(figsize=(4.8, total)), []
    for place, y_label in enumerate(y_labels, 1):
        box = (0.125, (total - place * height + 0.528) / total, 0.615, (height - 0.848) / total)
        panels.append(plain_axes(figure, box))
        set_left_title(panels[-1], y_label)
    return figure, panels


def set_left_title(
    axes: Axes, text: str, size: float = FONT_SIZE, weight: str = "normal", beside: float = 0.0
) -> None:
    """Write a title above the axes, fitted into the figure; `beside` points at the right are for another one."""
    figure: Any = axes.figure
    text, size = fitted(text, (0.99 - axes.get_position().x0) * _width(figure) - beside, size, 1, weight)
    axes.set_title(text, loc="left", fontsize=size, fontweight=weight, color=INK, pad=4, parse_math=False)


def fitted(text: str, width: float, size: float, lines: int, weight: str = "normal") -> tuple[str, float]:
    """A text in at most so many lines of a width in points, and its font size.

    It is written smaller if it is too long, and then cut in the middle, where names differ least.
    """
    for smaller in (size, size - 1.5, size - 3):
        wrapped = _wrapped(text, width, smaller, weight)
        if len(wrapped) <= lines:
            return "\n".join(wrapped), smaller
    letters = len(text)
    while len(wrapped) > lines and letters > 2:
        letters -= 1
        shorter = f"{text[: (letters + 1) // 2]}…{text[len(text) - letters // 2 :]}"
        wrapped = _wrapped(shorter, width, smaller, weight)
    return "\n".join(wrapped), smaller


def _wrapped(text: str, width: float, size: float, weight: str) -> list[str]:
    """Lines of at most this width in points, which end after a space or a sign if possible."""
    font = FontProperties(size=size, weight=weight)

    def fits(line: str) -> bool:
        drawn: float = text_to_path.get_text_width_height_descent(line.rstrip(), font, ismath=False)[0]
        return drawn <= 0.97 * width  # hints make letters a little wider

    lines = [""]
    for part in re.findall(r"[^\s/_-]*[\s/_-]|[^\s/_-]+", text):
        if not fits(lines[-1] + part) and lines[-1]:
            lines.append("")
        for letter in part:
            if not fits(lines[-1] + letter) and lines[-1]:
                lines.append("")
            lines[-1] += letter
    return [line.strip() for line in lines if line.strip()] or [""]


def _width(figure: Figure) -> float:
    return float(figure.get_figwidth()) * 72


def plain_axes(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes in a box (left, bottom, width, height, as shares of the figure) with two spines and a light grid."""
    axes = figure.add_axes(box)
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=FONT_SIZE - 1)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def short_number(tokens: float) -> str:
    """64, 2k, 1M: multiples of 1,024 with a suffix."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{int(tokens // size)}{unit}"
    return f"{int(tokens):,}"


def set_ticks(axis: Axis, places: Sequence[float], text: Callable[[float], str]) -> None:
    """Ticks at these places and no others, with the text for each."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def position_axis(axes: Axes, first: float, last: float) -> None:
    """A logarithmic axis of context lengths with at most seven ticks at powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, last)
    low, high = math.ceil(math.log2(first) - 1e-9), math.floor(math.log2(last) + 1e-9)
    step = max(1, math.ceil((high - low + 1) / 7))
    set_ticks(axes.xaxis, [2**power for power in range(high, low - 1, -step)], short_number)
    axes.set_xlabel("Position (tokens of context)", fontsize=FONT_SIZE - 0.5, color=MUTED)


def perplexity_axis(axes: Axes) -> None:
    """A logarithmic vertical axis from 1 on at least, with plain numbers, over what is drawn."""
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1))
    low, high = axes.get_ylim()
    few = [float(place) for place in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)]
    many = [step * 10.0**power for power in range(math.ceil(math.log10(high))) for step in (1, 2, 5)]
    places = [place for place in (few if high < 10 * low else many) if low <= place <= high]
    set_ticks(axes.yaxis, places[:: 1 + len(places) // 9], "{:,.6g}".format)


def length_axis(axes: Axes, lengths: Sequence[int], unit: str) -> None:
    """A logarithmic axis with at most seven of the lengths as ticks, the last one among them."""
    step = -(-len(lengths) // 7)
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.06)
    set_ticks(axes.xaxis, lengths[(len(lengths) - 1) % step :: step], short_number)
    axes.set_xlabel(f"Length ({unit})", fontsize=FONT_SIZE - 0.5, color=MUTED)


def draw_band(axes: Axes, x: Sequence[float], values: Sequence[Estimate], color: str) -> None:
    """The intervals of values as a band; nothing where none has one."""
    bounds = [(value.low, value.high) for value in values if value.low is not None and value.high is not None]
    if bounds:
        low, high = zip(*bounds, strict=True)
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def bin_centers(curve: Curve) -> list[float]:
    """Geometric middle of the context lengths of each bin: positions [a, b) have a + 1 to b tokens of context."""
    return [math.sqrt((a + 1) * b) for a, b in pairwise(curve.edges)]


def mark_training_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """A vertical line at each training length, named at the top; positions below all of them are shaded."""
    axes.axvspan(axes.get_xlim()[0], min(lengths), color=GRID, alpha=0.35, linewidth=0)
    for length in sorted(set(lengths)):
        axes.axvline(length, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
    known = [short_number(length) for length in sorted(set(lengths))]
    text = "trained on " + (", ".join(known) if len(known) < 4 else f"{known[0]} to {known[-1]}")
    place = float((axes.transData + axes.transAxes.inverted()).transform((min(lengths), 0))[0])
    axes.annotate(
        text,
        (min(lengths), 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -2) if place < 0.6 else (-4, -2),
        textcoords="offset points",
        ha="left" if place < 0.6 else "right",
        va="top",
        fontsize=FONT_SIZE - 1.5,
        color=MUTED,
    )


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write the label of each line to the right of the axes, moved apart where labels would overlap.

    `ends` are (height in data units, label, color); the limits of the axes must be final.
    """
    figure: Any = axes.figure
    box = axes.get_position()
    height = box.height * figure.get_figheight() * 72
    width = (0.995 - box.x0 - 1.02 * box.width) * _width(figure)
    ordered = sorted(ends)
    lines = max(1, min(4, int(height / (FONT_SIZE * LABEL_GAP * max(1, len(ends))))))
    texts = [fitted(label, width, FONT_SIZE, lines, "bold") for _, label, _ in ordered]
    halves = [(text.count("\n") + 1) * size * LABEL_GAP / height / 2 for text, size in texts]
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [min(max(float(to_axes.transform((axes.get_xlim()[1], y))[1]), 0.0), 1.0) for y, _, _ in ordered]
    heights[0] = max(heights[0], halves[0])  # above the number at the end of the axis
    for lower, upper in pairwise(range(len(ordered))):
        heights[upper] = max(heights[upper], heights[lower] + halves[lower] + halves[upper])
    # The topmost label may now stand too high: push the pile down again.
    heights[-1] = min(heights[-1], 1.0 - halves[-1])
    for upper, lower in pairwise(reversed(range(len(ordered)))):
        heights[lower] = min(heights[lower], heights[upper] - halves[lower] - halves[upper])
    for place, (text, size), (_, _, color) in zip(heights, texts, ordered, strict=True):
        axes.text(
            1.02,
            place,
            text,
            transform=axes.transAxes,
            va="center",
            color=color,
            fontsize=size,
            fontweight="bold",
            linespacing=1.05,
            parse_math=False,
        )
