"""One function per figure; each reads results only and returns a matplotlib Figure that no global state knows."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from hf_recurrent_lengthgen.evaluation.results import ComparedModel, Curve
from hf_recurrent_lengthgen.plotting.style import (
    INK,
    ROLE_LINES,
    bin_centers,
    label_ends,
    mark_training_lengths,
    model_colors,
    new_axes,
    position_axis,
)

Resolution = Literal["coarse", "fine"]


def position_wise_figure(
    models: Sequence[ComparedModel],
    quantity: Literal["nll", "perplexity"] = "nll",
    resolution: Resolution = "coarse",
    first: int | None = None,
) -> Figure:
    """NLL or perplexity against position for several models, with their intervals over sequences.

    Args:
        models: Models evaluated on the same data.
        quantity: "nll" in nats per token, or "perplexity" on a logarithmic axis.
        resolution: Which of the stored bins to draw.
        first: Least tokens of context shown; by default an eighth of the shortest training length.
    """
    unit = _unit(models)
    convert: Callable[[float], float]
    if quantity == "nll":
        figure, axes = new_axes(f"Negative log-likelihood (nats per {unit})")
        convert = float
    elif quantity == "perplexity":
        figure, axes = new_axes(f"Perplexity (per {unit})")
        convert = math.exp
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        raise ValueError(f"quantity must be 'nll' or 'perplexity', got {quantity!r}.")
    curves = [getattr(model.evaluation.position_wise, resolution) for model in models]
    shortest = min(model.evaluation.training_length for model in models)
    _overlay(axes, models, curves, first or max(1, shortest // 8), convert)
    mark_training_lengths(axes, [model.evaluation.training_length for model in models])
    return figure


def context_harm_figure(models: Sequence[ComparedModel], resolution: Resolution = "coarse") -> Figure:
    """Context harm against position for several models, with paired intervals and the zero line."""
    figure, axes = new_axes(f"Harm of extra context (nats per {_unit(models)})")
    axes.axhline(0, color=INK, linewidth=1)
    curves = [getattr(model.evaluation.harm.curves, resolution) for model in models]
    _overlay(axes, models, curves, min(model.evaluation.training_length for model in models) // 2)
    mark_training_lengths(axes, [model.evaluation.training_length for model in models])
    return figure


def in_window_figure(models: Sequence[ComparedModel]) -> Figure:
    """NLL from the zero state by position inside the training length, with intervals over sequences."""
    figure, axes = new_axes(f"NLL within training length (nats per {_unit(models)})")
    _overlay(axes, models, [model.evaluation.in_window.curve for model in models], 1)
    return figure


def _unit(models: Sequence[ComparedModel]) -> str:
    if not models:
        raise ValueError("A figure needs at least one model, got none.")
    return models[0].evaluation.data.token_unit


def _overlay(
    axes: Axes,
    models: Sequence[ComparedModel],
    curves: Sequence[Curve],
    first: int,
    convert: Callable[[float], float] = float,
) -> None:
    """Lines with bands from `first` tokens of context on, the axis of positions, and the labels."""
    colors, ends = model_colors(models), []
    for model, curve, color in zip(models, curves, colors, strict=True):
        # Only bins in sight, so that the others do not stretch the vertical axis.
        skipped = sum(edge < first - 1 for edge in curve.edges[:-1])
        x, y = bin_centers(curve)[skipped:], [convert(mean) for mean in curve.mean[skipped:]]
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=color, linewidth=2, linestyle=ROLE_LINES[model.role], marker=marker)
        if curve.low is not None and curve.high is not None:
            low, high = ([convert(bound) for bound in bounds[skipped:]] for bounds in (curve.low, curve.high))
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        ends.append((y[-1], model.evaluation.model, color))
    position_axis(axes, first, max(curve.edges[-1] for curve in curves))
    label_ends(axes, ends)
