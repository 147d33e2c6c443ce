"""Figures of the effect of distant tokens on predictions, and of the loss on a prompt of one token."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from hf_recurrent_lengthgen.evaluation.diagnosis_results import ConstantPrompt, Remembrance
from hf_recurrent_lengthgen.evaluation.results import Estimate, Role
from hf_recurrent_lengthgen.plotting.style import (
    FONT_SIZE,
    MUTED,
    ROLE_LINES,
    bin_centers,
    label_ends,
    mark_training_lengths,
    new_axes,
    position_axis,
    role_colors,
)

Result = TypeVar("Result", Remembrance, ConstantPrompt)


def remembrance_figure(models: Mapping[str, Remembrance], roles: Sequence[Role]) -> Figure:
    """Change of predictions (total variation) if only the last tokens are kept, with intervals.

    Right of the training length it should be 0. `roles` are the roles of the models, for their colors.
    """
    figure, axes = new_axes("Change of the prediction (total variation)")
    ends = []
    for name, result, role, color in _each(models, roles):
        x, values = [result.length - start for start in result.starts], result.total_variation
        axes.plot(x, [value.mean for value in values], color=color, linewidth=2, linestyle=ROLE_LINES[role])
        _band(axes, x, values, color)
        # All curves end at 0, where all tokens are kept, so labels have the order at one training length.
        beside = min(range(len(x)), key=lambda place: abs(x[place] - result.training_length))
        ends.append((values[beside].mean, name, color))
    tallest = max(value.high or value.mean for result in models.values() for value in result.total_variation)
    axes.set_ylim(0, min(1.0, 0.2 * math.ceil(5.5 * tallest + 1e-9)) or 0.2)
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    position_axis(axes, 1, max(result.length for result in models.values()))
    mark_training_lengths(axes, [result.training_length for result in models.values()])
    axes.set_xlabel("Number of last tokens kept", fontsize=FONT_SIZE - 0.5, color=MUTED)
    label_ends(axes, ends)
    return figure


def constant_prompt_figure(models: Mapping[str, ConstantPrompt], roles: Sequence[Role]) -> Figure:
    """NLL of a prompt of one repeated token by position, with a dotted line above which a model has failed."""
    figure, axes = new_axes("Loss on one token repeated (nats per token)")
    ends = []
    for name, result, role, color in _each(models, roles):
        # The limit, too, leaves out the first bin.
        x, y = bin_centers(result.curve)[1:], result.curve.mean[1:]
        axes.plot(x, y, color=color, linewidth=2, linestyle=ROLE_LINES[role])
        limit = result.factor * result.inside
        axes.plot([result.training_length, result.length], [limit, limit], color=color, linewidth=1.2, linestyle=":")
        axes.annotate(
            f"{result.factor:g}x the highest inside",
            (result.length, limit),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            fontsize=FONT_SIZE - 2,
            color=color,
        )
        ends.append((y[-1], name, color))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)  # room for the mark above the lines
    position_axis(axes, 2, max(result.length for result in models.values()))
    axes.set_xlabel("Tokens read", fontsize=FONT_SIZE - 0.5, color=MUTED)
    mark_training_lengths(axes, [result.training_length for result in models.values()])
    label_ends(axes, ends)
    return figure


def _each(models: Mapping[str, Result], roles: Sequence[Role]) -> list[tuple[str, Result, Role, str]]:
    """Name, result, role and color of each model."""
    return list(zip(models, models.values(), roles, role_colors(roles), strict=True))


def _band(axes: Axes, x: Sequence[float], values: Sequence[Estimate], color: str) -> None:
    bounds = [(value.low, value.high) for value in values if value.low is not None and value.high is not None]
    if bounds:
        low, high = zip(*bounds, strict=True)
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
