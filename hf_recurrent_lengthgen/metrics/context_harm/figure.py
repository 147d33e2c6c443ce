"""One function per figure; each reads results only and returns a matplotlib Figure outside pyplot's global state."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.results import Curve
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel
from hf_recurrent_lengthgen.plotting import style


def position_wise_figure(models: Sequence[ComparedModel]) -> Figure:
    """NLL by position for several models on the same data, with intervals over sequences."""
    figure, axes = style.new_axes(f"Negative log-likelihood (nats per {models[0].evaluation.data.token_unit})")
    lengths = [model.evaluation.training_length for model in models]
    _overlay(axes, models, [model.evaluation.position_wise.coarse for model in models], max(1, min(lengths) // 8))
    style.mark_training_lengths(axes, lengths)
    return figure


def context_harm_figure(models: Sequence[ComparedModel]) -> Figure:
    """Context harm by position for several models, with paired intervals and the zero line."""
    figure, axes = style.new_axes(f"Harm of extra context (nats per {models[0].evaluation.data.token_unit})")
    axes.axhline(0, color=style.INK, linewidth=1)
    lengths = [model.evaluation.training_length for model in models]
    _overlay(axes, models, [model.evaluation.harm.curves.coarse for model in models], min(lengths) // 2)
    style.mark_training_lengths(axes, lengths)
    return figure


def in_window_figure(models: Sequence[ComparedModel]) -> Figure:
    """NLL from the zero state by position inside the training length, with intervals over sequences."""
    figure, axes = style.new_axes(f"NLL within training length (nats per {models[0].evaluation.data.token_unit})")
    _overlay(axes, models, [model.evaluation.in_window.curve for model in models], 1)
    return figure


def _overlay(axes: Axes, models: Sequence[ComparedModel], curves: Sequence[Curve], first: int) -> None:
    """Lines with bands from `first` tokens of context, the axis of positions, and the labels."""
    colors, ends = style.role_colors([model.role for model in models]), []
    for model, curve, color in zip(models, curves, colors, strict=True):
        # Only visible bins, so that the others do not stretch the vertical axis.
        skipped = sum(edge < first - 1 for edge in curve.edges[:-1])
        x, y = style.bin_centers(curve)[skipped:], curve.mean[skipped:]
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=color, linewidth=2, linestyle=style.ROLE_LINES[model.role], marker=marker)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(x, curve.low[skipped:], curve.high[skipped:], color=color, alpha=0.18, linewidth=0)
        ends.append((y[-1], model.evaluation.model, color))
    style.position_axis(axes, first, max(curve.edges[-1] for curve in curves))
    style.label_ends(axes, ends)
