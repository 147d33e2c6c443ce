"""Accuracy on a task by the length of its strings, and over the steps of training."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hf_recurrent_lengthgen.plotting import style

_SHARES = (0, 0.2, 0.4, 0.6, 0.8, 1)
_LINES: tuple[Any, ...] = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))


def accuracy_figure(
    curves: Mapping[str, Mapping[int, tuple[float, float]]], unit: str, training_length: int | None = None
) -> Figure:
    """Share of right symbols (solid) and of right answers (dashed) for several models.

    Args:
        curves: Model -> length in `unit` -> both shares, from 0 to 1; the lengths are the same for all models.
        training_length: The longest length in training, which is marked; None for no mark.
    """
    lengths = sorted(next(iter(curves.values())))
    figure, axes = style.new_axes("Accuracy: symbols (solid), whole answers (dashed)")
    axes.set_ylim(-0.03, 1.13)  # room for the mark above the lines
    axes.set_yticks(_SHARES)
    style.length_axis(axes, lengths, unit)
    ends = []
    for (name, curve), color in zip(curves.items(), cycle(style.LINE_COLORS), strict=False):
        for part, line in enumerate(_LINES[:2]):
            heights = [curve[length][part] for length in lengths]
            axes.plot(lengths, heights, color=color, linestyle=line, marker="o", markersize=3.5, linewidth=1.8)
        ends.append((curve[lengths[-1]][0], name, color))
    if training_length is not None:
        style.mark_training_lengths(axes, [training_length])
    style.label_ends(axes, ends)
    return figure


def accuracy_over_steps_figure(runs: Mapping[str, Mapping[int, Mapping[int, float]]], unit: str) -> Figure:
    """Share of right symbols over the steps of training, a line for each run and length (Trockman et al., Fig. 1, 4).

    Args:
        runs: Run -> step -> length in `unit` -> share from 0 to 1; the lengths are the same everywhere.
    """
    lengths = sorted(next(iter(next(iter(runs.values())).values())))
    figure, axes = style.new_axes("Accuracy by symbol over steps")
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks(_SHARES)
    axes.set_xlabel("Optimizer steps", fontsize=style.FONT_SIZE - 0.5, color=style.MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ends = []
    for index, (run, curve) in enumerate(runs.items()):
        steps = sorted(curve)
        for place, length in enumerate(lengths):
            color = style.LINE_COLORS[(place if len(runs) == 1 else index) % len(style.LINE_COLORS)]
            heights = [curve[step][length] for step in steps]
            line = _LINES[place % len(_LINES)]
            axes.plot(steps, heights, color=color, linestyle=line, marker="o", markersize=3.5, linewidth=1.8)
            ends.append((heights[-1], f"{length} {unit}" if len(runs) == 1 else f"{run} {length}", color))
    style.label_ends(axes, ends)
    return figure
