"""One function per figure; each reads results only and returns a matplotlib Figure outside pyplot's global state."""

from collections.abc import Sequence
from math import exp
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.results import LARGEST_NLL, Curve
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel
from hf_recurrent_lengthgen.plotting import style


def position_wise_figure(models: Sequence[ComparedModel]) -> Figure:
    """Perplexity by position, exp of the mean NLL, for several models on the same data, with intervals."""
    curves = [_exp(model.evaluation.position_wise.coarse) for model in models]
    return _by_position(models, "Perplexity per {}", curves, log=True)


def mean_perplexity_figure(models: Sequence[ComparedModel]) -> Figure:
    """Mean over texts of the perplexity of each token, by position (Definition 3.1), with intervals."""
    if older := [model.evaluation.model for model in models if model.evaluation.mean_perplexity is None]:
        raise ValueError(f"{older} have no mean_perplexity, as an earlier version measured them: evaluate them again.")
    curves: Any = [model.evaluation.mean_perplexity for model in models]
    return _by_position(models, "Mean of the perplexities per {}", [curve.coarse for curve in curves], log=True)


def context_harm_figure(models: Sequence[ComparedModel]) -> Figure:
    """Excess loss from context by position for several models, with paired intervals and the zero line."""
    curves = [model.evaluation.harm.curves.coarse for model in models]
    return _by_position(models, "Excess loss from context (nats per {})", curves, log=False)


def in_window_figure(models: Sequence[ComparedModel]) -> Figure:
    """NLL from the zero state by position inside the training length, with intervals over sequences."""
    figure, axes = style.new_axes(f"NLL within training length (nats per {models[0].evaluation.data.token_unit})")
    curves = [model.evaluation.in_window.curve for model in models]
    low = [curve.low and tuple(max(0.0, x) for x in curve.low) for curve in curves]  # a loss is not below zero
    _overlay(axes, models, [Curve(c.edges, c.mean, each, c.high) for c, each in zip(curves, low, strict=True)], 1)
    return figure


def _exp(curve: Curve) -> Curve:
    bins: Any = [
        nll and tuple(exp(min(max(x, 0.0), LARGEST_NLL)) for x in nll) for nll in (curve.mean, curve.low, curve.high)
    ]
    return Curve(curve.edges, *bins)


def _by_position(models: Sequence[ComparedModel], title: str, curves: Sequence[Curve], log: bool) -> Figure:
    """Perplexities, on a logarithmic axis, or differences with their zero line; and the training lengths."""
    figure, axes = style.new_axes(title.format(models[0].evaluation.data.token_unit))
    lengths = [model.evaluation.training_length for model in models]
    if not log:
        axes.axhline(0, color=style.INK, linewidth=1)
    _overlay(axes, models, curves, max(1, min(lengths) // (8 if log else 2)), log)
    style.mark_training_lengths(axes, lengths)
    return figure


def _overlay(
    axes: Axes, models: Sequence[ComparedModel], curves: Sequence[Curve], first: int, log: bool = False
) -> None:
    """Lines with bands from `first` tokens of context, the axes, and the labels."""
    colors, ends = style.role_colors([model.role for model in models]), []
    for model, curve, color in zip(models, curves, colors, strict=True):
        # invisible bins would stretch the vertical axis
        skipped = sum(edge < first - 1 for edge in curve.edges[:-1])
        x, y = style.bin_centers(curve)[skipped:], curve.mean[skipped:]
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=color, linewidth=2, linestyle=style.ROLE_LINES[model.role], marker=marker)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(x, curve.low[skipped:], curve.high[skipped:], color=color, alpha=0.18, linewidth=0)
        ends.append((y[-1], model.evaluation.model, color))
    style.position_axis(axes, first, max(curve.edges[-1] for curve in curves))
    if log:
        style.perplexity_axis(axes)
    style.label_ends(axes, ends)
