"""Figures of retrieval from long texts: by depth and length, and by length."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.metrics.retrieval.result import RECALL_ACCURACY, RetrievalResult, Share
from hf_recurrent_lengthgen.plotting import style

_Box = tuple[float, float, float, float]  # left, bottom, width, height
WIDTH = 4.8
_ROW = 0.235  # height of a row of cells in inches
_ON_DARK, _ON_LIGHT = "#ffffff", "#101418"  # numbers in cells, which look the same on a dark page
_COLORS_OF_ACCURACY = colormaps["cividis"]  # from dark blue to yellow, also for color-blind readers
_TITLES = {"passkey": "Passkeys", "niah": "Needles in running text", "keys": "Keys in text", "babilong": "BABILong"}


def heat_map_figure(models: Sequence[RetrievalResult]) -> Figure:
    """Right answers in percent by depth (or bAbI task) and length, with one panel per model.

    A line separates the lengths inside the training length from those beyond.
    """
    rows, columns = len(models[0].rows), len(models[0].lengths)
    width, panel = max(WIDTH, 1.1 + 0.42 * columns), 0.8 + _ROW * rows
    height = panel * len(models) + 0.78
    figure = Figure(figsize=(width, height))
    what = "depth" if models[0].depths is not None else "task"
    title = f"{_TITLES[models[0].task]}: right answers in percent\nby {what} and length"
    figure.text(
        0.15 / width, 1 - 0.1 / height, title, fontsize=style.FONT_SIZE, color=style.INK, va="top", linespacing=1.25
    )
    for place, result in enumerate(models):
        bottom = 0.72 + panel * (len(models) - 1 - place)
        inches = (0.86, bottom, width - 0.96, _ROW * rows)
        _cells(figure.add_axes(_shares(inches, width, height)), result)
    _scale(figure.add_axes(_shares((0.86, 0.24, 1.5, 0.09), width, height)))
    return figure


def _shares(inches: _Box, width: float, height: float) -> _Box:
    """A box in inches (left, bottom, width, height) as shares of a figure."""
    return inches[0] / width, inches[1] / height, inches[2] / width, inches[3] / height


def _scale(axes: Axes) -> None:
    axes.imshow(np.linspace(0, 1, 64)[None], cmap=_COLORS_OF_ACCURACY, aspect="auto", extent=(0, 100, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([0, 50, 100], ["0", "50", "100 % right"])
    axes.tick_params(length=2, labelsize=style.FONT_SIZE - 2.5, colors=style.MUTED, labelcolor=style.MUTED, pad=1.5)
    axes.spines[:].set_visible(False)


def _cells(axes: Axes, result: RetrievalResult) -> None:
    shares = [[Share(cell.right, cell.samples).accuracy for cell in row] for row in result.cells]
    values = np.ma.masked_invalid([[np.nan if share is None else share for share in row] for row in shares])
    axes.pcolormesh(values, cmap=_COLORS_OF_ACCURACY, vmin=0, vmax=1, edgecolors="none", linewidth=0)
    axes.set_facecolor(style.GRID)
    axes.invert_yaxis()
    size = style.FONT_SIZE - 2
    for row, column in np.ndindex(values.shape):
        share = shares[row][column]
        text = "-" if share is None else f"{100 * share:.0f}"
        color = style.MUTED if share is None else _ON_DARK if share < 0.55 else _ON_LIGHT
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center_baseline", fontsize=size, color=color)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=style.FONT_SIZE - 2, labelcolor=style.INK, pad=3)
    names = [style.short_number(length) for length in result.lengths]
    axes.set_xticks([column + 0.5 for column in range(len(names))], names)
    axes.set_yticks([row + 0.5 for row in range(len(result.rows))], _row_names(result))
    axes.set_ylabel(
        "Depth (0 %: start)" if result.depths is not None else "Task",
        fontsize=style.FONT_SIZE - 1.5,
        color=style.MUTED,
    )
    axes.set_xlabel(
        f"Length ({result.data.token_unit}s)", fontsize=style.FONT_SIZE - 1.5, color=style.MUTED, labelpad=1
    )
    trained = ""
    if result.training_length is not None:
        trained = f", trained on {style.short_number(result.training_length)}"
        inside = sum(length <= result.training_length for length in result.lengths)
        if 0 < inside < len(result.lengths):
            axes.axvline(inside, color=_ON_DARK, linewidth=2.5)
            axes.axvline(inside, color=_ON_LIGHT, linewidth=1, linestyle=(0, (2, 2)))
    style.set_left_title(axes, f"{result.model}{trained}", style.FONT_SIZE - 0.5, "bold")


def _row_names(result: RetrievalResult) -> Sequence[str]:
    """Depths in whole percent if that distinguishes them, else as in the result."""
    short = [f"{100 * depth:.0f} %" for depth in result.depths or ()]
    return short if short and len(set(short)) == len(short) else result.rows


def retrieval_accuracy_figure(models: Sequence[RetrievalResult]) -> Figure:
    """Share of right answers by length for several models, with intervals and training lengths."""
    figure, axes = style.new_axes(f"{_TITLES[models[0].task]}: right answers (dots: 95 %)")
    trained = [result.training_length for result in models if result.training_length is not None]
    axes.set_ylim(-0.03, 1.13)  # room for the mark above the lines
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.axhline(RECALL_ACCURACY, color=style.MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    style.length_axis(axes, sorted({*models[0].lengths, *trained}), f"{models[0].data.token_unit}s")
    if trained:
        style.mark_training_lengths(axes, trained)
    ends = []
    for result, color in zip(models, cycle(style.LINE_COLORS), strict=False):
        pairs = [
            (length, share) for length, share in zip(result.lengths, result.by_length, strict=True) if share.samples
        ]
        if pairs:
            lengths, shares = zip(*pairs, strict=True)
            heights = [share.right / share.samples for share in shares]
            axes.plot(lengths, heights, color=color, linewidth=1.8, marker="o", markersize=3.5)
            low, high = zip(*(share.interval(result.confidence) for share in shares), strict=True)
            axes.fill_between(lengths, low, high, color=color, alpha=0.18, linewidth=0)
            ends.append((heights[-1], result.model, color))
    style.label_ends(axes, ends)
    return figure


def mistakes_figure(models: Sequence[RetrievalResult]) -> Figure:
    """Answers by length, one panel per model: the right ones, and what the wrong ones say instead, in percent."""
    figure, panels = style.stacked_axes([f"{result.model}: answers in percent" for result in models], 2.4)
    for axes, result in zip(panels, models, strict=True):
        places, below = range(len(result.lengths)), np.zeros(len(result.lengths))
        right = tuple(share.right for share in result.by_length)
        samples = np.array([max(1, share.samples) for share in result.by_length])
        colors, ends = cycle(style.LINE_COLORS), []
        for kind, counts in ({"right": right} | result.mistakes_by_length).items():
            color = style.MUTED if kind == "other" else next(colors)
            heights = 100 * np.array(counts) / samples
            axes.bar(places, heights, 0.8, below, color=color, linewidth=0)
            if sum(counts):
                ends.append((float(below[-1] + heights[-1] / 2), kind, color))
            below += heights
        axes.set_ylim(0, 100)
        axes.set_xticks(places, [style.short_number(length) for length in result.lengths])
        axes.set_xlabel(f"Length ({result.data.token_unit}s)", fontsize=style.FONT_SIZE - 0.5, color=style.MUTED)
        style.label_ends(axes, ends)
    return figure
