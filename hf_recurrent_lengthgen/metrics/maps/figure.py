"""Attention maps and masks of a model's layers in one figure (Trockman et al., 2024, Figures 2, 4 and 11)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps, LayerMaps
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, GRID, INK, MUTED, fitted

LABELED_TOKENS = 32
"""Maximum number of tokens that are written at the axes; longer texts have positions instead."""
PANEL = 2.15
"""Side of a panel in inches."""


def attention_maps_figure(*models: AttentionMaps) -> Figure:
    """Two panels per layer: the channel average of its maps above, its average mask below; those of several models
    side by side, as in Figure 4.

    Rows are the tokens of the output, columns the tokens of the input. Weights above 0 are red, weights below 0 blue.
    Each map has its own scale, on which color grows with the square root of the weight, so that a hundredth of the
    largest weight is still visible. Masks range from 0 (forgotten), or the least of all layers below it, to 1.
    """
    shown = [(maps, layer) for maps in models for layer in maps.layers]
    count = len(shown)
    columns = min(count, 4 if count <= 12 else 6)
    bands = -(-count // columns)
    figure = Figure(figsize=(PANEL * columns * 1.15 + 0.5, PANEL * bands * 2 + 0.8), layout="constrained")
    alone = len(models) == 1
    name = fitted(models[0].model, figure.get_figwidth() * 72 * 0.97, FONT_SIZE, 2)[0] + "\n" if alone else ""
    figure.suptitle(
        f"{name}above: attention maps\nbelow: masks"
        if columns < 3
        else f"{name}attention maps (channel average), and below each its average mask",
        fontsize=FONT_SIZE,
        color=INK,
        x=0.01,
        ha="left",
        parse_math=False,
    )
    grid = figure.subplots(2 * bands, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    masks, least = [], min(0.0, *(float(layer.mask.min()) for _, layer in shown))
    for index, (maps, layer) in enumerate(shown):
        band, column = divmod(index, columns)
        above, below = grid[2 * band, column], grid[2 * band + 1, column]
        image = _map_panel(above, layer.average)
        bar = figure.colorbar(image, cax=above.inset_axes((1.03, 0, 0.05, 1)))
        ticks = _round_ticks(layer.average)
        bar.set_ticks(ticks, labels=[f"{tick:.4g}" for tick in ticks])
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=FONT_SIZE - 4, colors=MUTED, labelcolor=INK)
        name, size = fitted("" if alone else maps.model, PANEL * 72, FONT_SIZE - 2.5, 1)
        title = _title(layer) if alone else f"{name}\n{_title(layer)}"
        above.set_title(title, fontsize=size, color=INK, loc="left", parse_math=False)
        masks.append(_panel(below, layer.mask, cmap="viridis", vmin=least, vmax=1.0))
        _token_axes(above, maps.tokens, names=False)
        _token_axes(below, maps.tokens, names=True)
    bar = figure.colorbar(masks[0], ax=list(grid.flat), location="bottom", shrink=0.5, aspect=40, pad=0.01)
    bar.set_label("mask: share retained", fontsize=FONT_SIZE - 2.5, color=MUTED)
    bar.ax.tick_params(labelsize=FONT_SIZE - 4, colors=MUTED, labelcolor=INK)
    return figure


def _title(layer: LayerMaps) -> str:
    correlation = "" if layer.cosine is None else f"\ncos(W_B, W_C) {layer.cosine:.2f}"
    return f"Layer {layer.layer}, {layer.kind}{correlation}"


def _panel(axes: Axes, values: np.ndarray, **style: object) -> AxesImage:
    """An image of the values; the future stays empty."""
    axes.set_visible(True)
    axes.set_anchor("W")
    axes.set_facecolor(GRID)
    axes.spines[:].set_visible(False)
    future = np.triu(np.ones(values.shape, dtype=bool), 1)
    return axes.imshow(np.ma.masked_where(future, values), interpolation="nearest", **style)  # type: ignore[arg-type]


def _map_panel(axes: Axes, values: np.ndarray) -> AxesImage:
    largest = _largest(values)
    root_and_square = (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x))
    norm = FuncNorm(root_and_square, vmin=-largest, vmax=largest)
    return _panel(axes, values, cmap="RdBu_r", norm=norm)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max()) or 1.0


def _round_ticks(values: np.ndarray) -> list[float]:
    """The largest one-digit number within the scale, a tenth of it, 0, and their negatives."""
    largest = _largest(values)
    unit = 10.0 ** np.floor(np.log10(largest))
    top = float(np.floor(largest / unit) * unit)
    return [-top, -top / 10, 0.0, top / 10, top]


def _token_axes(axes: Axes, tokens: Sequence[str], names: bool) -> None:
    size, turn = FONT_SIZE - 3.5, 0
    if len(tokens) <= LABELED_TOKENS:
        positions, labels = list(range(len(tokens))), [_visible(token) for token in tokens]
        size = min(size, 60 * PANEL / len(tokens))
        turn = 90 if any(len(label) > 2 or len(label) * len(labels) > LABELED_TOKENS for label in labels) else 0
    else:
        step = 10 ** int(np.log10(len(tokens) - 1))
        positions = list(range(0, len(tokens), step if len(tokens) / step > 2.5 else step // 2))
        labels = [str(position) for position in positions]
    axes.tick_params(length=0, labelsize=size, colors=MUTED, labelcolor=INK, pad=1)
    axes.tick_params(axis="x", rotation=turn)
    axes.set_yticks(positions, labels, parse_math=False)
    axes.set_xticks(positions if names else [], labels if names else [], parse_math=False)


def _visible(token: str) -> str:
    """A token in a few characters; spaces and line breaks as symbols."""
    return token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")[:8] or "∅"
