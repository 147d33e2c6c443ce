"""Figures of what far tokens do to predictions, and of the loss on a prompt of one token."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from hf_recurrent_lengthgen.evaluation.diagnosis_results import ConstantPrompt, Distance, Remembrance
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
    short_number,
)

DISTANCE_NAMES: dict[Distance, str] = {
    "total_variation": "total variation",
    "jensen_shannon": "Jensen-Shannon distance",
    "cosine": "1 - cosine similarity",
}
Result = TypeVar("Result", Remembrance, ConstantPrompt)


def remembrance_figure(
    models: Mapping[str, Remembrance],
    roles: Sequence[Role] | None = None,
    distance: Distance = "total_variation",
    against: Literal["kept", "start"] = "kept",
) -> Figure:
    """How far predictions move when all but the last tokens are left out, with intervals over sequences.

    Args:
        models: Name -> Effective Remembrance.
        roles: Of the models, for their colors; by default "other" for all.
        distance: Which of the three.
        against: "kept": number of last tokens that are kept, on a logarithmic axis, where what lies right of the
            training length should be 0. "start": the start point t, as in the paper's figures.

    Raises:
        ValueError: for no models, another number of roles, or an unknown distance or axis.
    """
    if distance not in DISTANCE_NAMES:
        raise ValueError(f"distance must be one of {', '.join(DISTANCE_NAMES)}, got {distance!r}.")
    if against not in ("kept", "start"):
        raise ValueError(f"against must be 'kept' or 'start', got {against!r}.")
    figure, axes = new_axes(f"Change of the prediction ({DISTANCE_NAMES[distance]})")
    ends = []
    for name, result, role, color in _each(models, roles):
        values: Sequence[Estimate] = getattr(result, distance)
        x = [result.length - start if against == "kept" else start for start in result.starts]
        axes.plot(x, [value.mean for value in values], color=color, linewidth=2, linestyle=ROLE_LINES[role])
        _band(axes, x, values, color)
        # All curves are 0 where nothing is left out: the labels stand in the order at one training length.
        beside = min(result.starts, key=lambda start: abs(result.length - start - result.training_length))
        shown = values[result.starts.index(beside)] if against == "kept" else values[-1]
        ends.append((shown.mean, name, color))
    tallest = max(value.high or value.mean for result in models.values() for value in getattr(result, distance))
    axes.set_ylim(0, min(1.0, 0.2 * math.ceil(5.5 * tallest + 1e-9)) or 0.2)
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    longest = max(result.length for result in models.values())
    if against == "kept":
        position_axis(axes, 1, longest)
        mark_training_lengths(axes, [result.training_length for result in models.values()])
        axes.set_xlabel("Last tokens that are kept", fontsize=FONT_SIZE - 0.5, color=MUTED)
    else:
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_locator(MultipleLocator(longest / 4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.set_xlabel("First tokens that are left out", fontsize=FONT_SIZE - 0.5, color=MUTED)
        _mark_one_training_length(axes, models)
    label_ends(axes, ends)
    return figure


def constant_prompt_figure(models: Mapping[str, ConstantPrompt], roles: Sequence[Role] | None = None) -> Figure:
    """NLL of a prompt of one repeated token by position; dotted, the limit above which a model has failed.

    Args:
        models: Name -> loss on the prompt.
        roles: As for `remembrance_figure`.

    Raises:
        ValueError: for no models, or another number of roles.
    """
    figure, axes = new_axes("Loss on one token repeated (nats per token)")
    ends = []
    for name, result, role, color in _each(models, roles):
        # The first bin is left out, as in the limit.
        x, y = bin_centers(result.curve)[1:], result.curve.mean[1:]
        axes.plot(x, y, color=color, linewidth=2, linestyle=ROLE_LINES[role])
        limit = result.factor * result.inside
        axes.plot([result.training_length, result.length], [limit, limit], color=color, linewidth=1.2, linestyle=":")
        axes.annotate(
            f"{result.factor:g}x the highest before",
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


def _each(models: Mapping[str, Result], roles: Sequence[Role] | None) -> list[tuple[str, Result, Role, str]]:
    """Name, result, role and color of each model."""
    if not models:
        raise ValueError("A figure needs at least one model, got none.")
    given: Sequence[Role] = ["other"] * len(models) if roles is None else roles
    if len(given) != len(models):
        raise ValueError(f"{len(models)} models need as many roles, got {len(given)}.")
    return list(zip(models, models.values(), given, role_colors(given), strict=True))


def _band(axes: Axes, x: Sequence[float], values: Sequence[Estimate], color: str) -> None:
    bounds = [(value.low, value.high) for value in values if value.low is not None and value.high is not None]
    if bounds:
        low, high = zip(*bounds, strict=True)
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def _mark_one_training_length(axes: Axes, models: Mapping[str, Remembrance]) -> None:
    """Lines a training length before the end of each model's texts."""
    for start in sorted({result.length - result.training_length for result in models.values()}):
        axes.axvline(start, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            "one training\nlength is kept",
            (start, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -2),
            textcoords="offset points",
            va="top",
            ha="right",
            fontsize=FONT_SIZE - 1.5,
            color=MUTED,
        )
