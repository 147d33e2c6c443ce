"""Tables and figures of the studies."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from small_setting import Result
from starts import FAMILIES
from study_pages import band, legend_below, markdown, over_seeds, panels

from hf_recurrent_lengthgen.plotting.style import FONT_SIZE

COLORS = ("#d55e00", "#0072b2", "#56b4e9", "#009e73", "#aa4499", "#a8780f")
Measured = Mapping[tuple[str, tuple[str, ...]], Mapping[int, Result]]
"""Measurements by family and labels, then by seed."""


class Layout(NamedTuple):
    """How the results of a study are shown.

    Attributes:
        columns: What the labels of an arm are.
        measures: What the table has of each arm.
        drawn: What the figure has of each; nothing for no figure.
        x: The column of numbers on the x axis; None for the length, as multiples of the longest in training.
        panel: The column that has a panel for each of its labels.
    """

    columns: tuple[str, ...]
    measures: tuple[str, ...] = ("1x", "2x", "4x")
    drawn: tuple[str, ...] = ()
    x: int | None = None
    panel: int | None = None


def table(layout: Layout, results: Measured) -> str:
    """One row for each arm: mean over seeds, least and most."""
    rows = [
        [FAMILIES[family], *labels, ", ".join(map(str, seeds))]
        + [over_seeds(list(seeds.values()), measure, ".2f") for measure in layout.measures]
        for (family, labels), seeds in results.items()
    ]
    return markdown(["model", *layout.columns, "seeds", *layout.measures], rows)


def figure(layout: Layout, results: Measured) -> Figure:
    """Means over seeds as lines, with bands from least to most; no panel with a single value of x next to others."""
    drawn: dict[str, dict[str, dict[float, list[float]]]] = {}  # by panel, line and x
    for (family, labels), seeds in results.items():
        title = [FAMILIES[family]]
        if layout.panel is not None:
            title.append(f"{layout.columns[layout.panel]} {labels[layout.panel]}")
        line = ", ".join(label for column, label in enumerate(labels) if column not in (layout.panel, layout.x))
        for measure in layout.drawn:
            panel = ", ".join(title if layout.x is None else [*title, measure])
            x = float(measure.rstrip("x") if layout.x is None else labels[layout.x])
            values = [result[measure] for result in seeds.values()]
            drawn.setdefault(panel, {}).setdefault(line, {})[x] = values
    drawn = {p: lines for p, lines in drawn.items() if any(len(points) > 1 for points in lines.values())} or drawn
    picture, axes = panels(list(drawn), min(3, len(drawn)))
    lines = list(dict.fromkeys(line for panel in drawn.values() for line in panel))
    for axis, panel in zip(axes, drawn.values(), strict=True):
        for line, points in panel.items():
            x, columns, color = list(points), list(points.values()), COLORS[lines.index(line) % len(COLORS)]
            style: Any = ("solid", "dashed", "dotted")[lines.index(line) // len(COLORS)]
            band(axis, x, columns, 0.12, color=color, linestyle=style, marker="o", markersize=3, label=line)
        ticks = sorted({x for points in panel.values() for x in points})
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.minorticks_off()
        axis.set_ylim(-0.02, 1.04)
        label = "length / longest training length" if layout.x is None else layout.columns[layout.x]
        axis.set_xlabel(label, fontsize=FONT_SIZE)
        axis.set_ylabel("area under accuracy" if layout.drawn == ("area",) else "accuracy", fontsize=FONT_SIZE)
    legend_below(picture, axes, 3)
    return picture
