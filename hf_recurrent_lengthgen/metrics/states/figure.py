"""Figures of the states of one or several models: which heads leave the range of training, and what harm they do.

Every figure has one panel per model (name -> states), stacked and on the same scale. Drifting heads are orange.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from hf_recurrent_lengthgen.metrics.states.result import HeadStates, LayerStates, StateDiagnosis
from hf_recurrent_lengthgen.plotting.style import (
    FONT_SIZE,
    GRID,
    INK,
    MUTED,
    ROLE_COLORS,
    label_ends,
    mark_training_lengths,
    plain_axes,
    position_axis,
    set_left_title,
)

DRIFT, STEADY = ROLE_COLORS["base"], ROLE_COLORS["cured"]
NAMED_HEADS = 6
"""Maximum number of heads named beside a panel of `HEIGHT`; fewer beside a lower one."""
MAP_ROWS = 24
"""Maximum number of heads in a panel of the map of distances."""
DRAWN_HEADS = 40
"""Maximum number of heads of each kind, drifting or not, that have a line."""
WIDTH, HEIGHT, LEFT, RIGHT, TITLE, BOTTOM, GAP = 4.8, 1.75, 0.55, 1.05, 0.8, 0.55, 0.5
"""Inches."""


def whole_std_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """Standard deviation of the whole recurrent state and of each layer's, relative to that at the training length, by
    position (Buitrago Ruiz and Gu, 2025, Figure 4, show absolute values of the whole state)."""
    figure, panels = panels_of(
        diagnoses,
        "Spread of the whole state",
        "Standard deviation relative to that at the training length.\nBlack: all layers together. Blue: each layer",
    )
    layers = [
        [_relative(layer.std, diagnosis) for layer in diagnosis.layers if layer.std is not None]
        for diagnosis in diagnoses.values()
    ]
    whole = [_relative(diagnosis.std, diagnosis) for diagnosis in diagnoses.values()]
    _ratio_axes(panels, diagnoses, [*whole, *(curve for curves in layers for curve in curves)])
    for axes, diagnosis, curves, together in zip(panels, diagnoses.values(), layers, whole, strict=True):
        for curve in curves:
            axes.plot(diagnosis.positions, curve, color=STEADY, linewidth=1.2, alpha=0.8)
        axes.plot(diagnosis.positions, together, color=INK, linewidth=2)
        label_ends(axes, [(together[-1], f"{diagnosis.std[-1]:.3g}", INK)])
    return figure


def state_std_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """Standard deviation of each head's state, relative to that at the training length, by position (Buitrago Ruiz and
    Gu, 2025, Figure 9)."""
    return _head_figure(
        diagnoses,
        "Spread of each head's state",
        "Standard deviation relative to that at the training length",
        {"": lambda diagnosis, head: _relative(head.std, diagnosis)},
        logarithmic=True,
    )


def outlier_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """How far the largest element of each head's state is from the head's mean, in standard deviations of the head, by
    position; heads without details are left out. A head whose spread comes from a few channels has a high line (Chen
    et al., 2024, Figure 6, show the channels of one head at two positions)."""

    def outlier(_: StateDiagnosis, head: HeadStates) -> list[float] | None:
        if head.extremes is None or head.mean is None:
            return None
        curves = zip(head.extremes.value, head.mean, head.std, strict=True)
        return [abs(value - mean) / std if std else math.nan for value, mean, std in curves]

    return _head_figure(
        diagnoses,
        "Outliers among the elements of each head's state",
        "Largest element, in standard deviations of the head",
        {"": outlier},
        logarithmic=True,
    )


def inputs_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """What each head's recurrence gets, relative to the training length, by position: step sizes (if it has any) and
    the norms of keys and values, that is Delta_t, B_t and x_t (Chen et al., 2024, Figure 7)."""
    names = {"step": "step size", "key": "keys (B)", "value": "values (x)"}

    def curve_of(name: str) -> Curves:
        def curve(diagnosis: StateDiagnosis, head: HeadStates) -> list[float] | None:
            values = getattr(head.inputs, name, None)
            return None if values is None else _relative(values, diagnosis)

        return curve

    return _head_figure(
        diagnoses,
        "What the recurrence of each head gets",
        "Mean step size and norms, relative to those at the training length",
        {f", {label}": curve_of(name) for name, label in names.items()},
        logarithmic=True,
        height=1.2,
    )


def retention_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """What each head retains of the first token, alpha_{2:n}, by position (Chen et al., 2024, Figure 3); heads without
    recorded inputs are left out."""
    figure = _head_figure(
        diagnoses,
        "How much of the first token a head still holds",
        "1: all of what the token wrote; 0: nothing",
        {"": lambda _, head: None if head.inputs is None else [math.exp(x) for x in head.inputs.log_retention]},
        logarithmic=False,
    )
    for axes in figure.axes:
        axes.set_ylim(0, 1.2)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    return figure


def conv_std_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """Standard deviation of the parts of each layer's convolution state, relative to that at the training length, on
    the scale of `state_std_figure` (Chen et al., 2024, Figure 17, show absolute values)."""
    figure, panels = panels_of(
        diagnoses, "Spread of the convolution states", "Standard deviation relative to that at the training length"
    )
    curves = [
        [_relative(part.std, diagnosis) for layer in diagnosis.layers for part in layer.conv]
        for diagnosis in diagnoses.values()
    ]
    heads = [_relative(head.std, diagnosis) for diagnosis in diagnoses.values() for _, head in diagnosis.ranking]
    _ratio_axes(panels, diagnoses, [*heads, *(curve for parts in curves for curve in parts)])
    for axes, diagnosis, parts in zip(panels, diagnoses.values(), curves, strict=True):
        for curve in parts:
            axes.plot(diagnosis.positions, curve, color=STEADY, linewidth=1.3, alpha=0.8)
        if parts:
            label_ends(axes, [(max(curve[-1] for curve in parts), f"{len(parts)} parts", STEADY)])
    return figure


def distance_map_figure(diagnoses: Mapping[str, StateDiagnosis]) -> Figure:
    """Distance of each head's states from those inside the training length, by position, worst heads first.

    Colors change at a distance of 1 standard deviation, on a logarithmic scale.
    """
    ranked = [diagnosis.ranking[:MAP_ROWS] for diagnosis in diagnoses.values()]
    heights = [max(0.8, 0.19 * len(rows)) for rows in ranked]
    figure, panels = panels_of(
        diagnoses,
        "How far each head's states are from those in training",
        "Wasserstein distance, in standard deviations of training.\nDashed: training length (L0 H5: layer 0, head 5)",
        heights,
        beside=180.0,
    )
    largest = max(max(head.distance) for rows in ranked for _, head in rows)
    top = max(1.0, math.log10(largest))
    colors = LinearSegmentedColormap.from_list(
        "drift", [(0, "#f4f5f7"), (0.5, "#c9d7e4"), (0.501, "#fbd9b5"), (0.75, DRIFT), (1, "#6b2a00")]
    )
    norm = TwoSlopeNorm(0, -1, top)
    for axes, diagnosis, rows in zip(panels, diagnoses.values(), ranked, strict=True):
        first = _first_place(diagnosis)
        positions = diagnosis.positions[first:]
        values = np.log10([np.maximum(head.distance[first:], 0.1) for _, head in rows])
        edges = _cell_edges(positions)
        mesh = axes.pcolormesh(edges, np.arange(len(rows) + 1), values, cmap=colors, norm=norm, edgecolors="none")
        position_axis(axes, edges[0], edges[-1])
        axes.set_ylim(len(rows), 0)
        axes.set_yticks(np.arange(len(rows)) + 0.5, [_short_name(layer, head) for layer, head in rows])
        axes.tick_params(axis="y", length=0, labelsize=FONT_SIZE - 2)
        axes.grid(False)
        axes.axvline(diagnosis.training_length, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        left_out = len(diagnosis.ranking) - len(rows)
        if left_out:
            axes.set_title(f"and {left_out:,} nearer heads", loc="right", fontsize=FONT_SIZE - 1.5, color=MUTED, pad=3)
    _hide_inner_labels(panels)
    box = panels[0].get_position()
    bar = figure.colorbar(mesh, cax=figure.add_axes((box.x1 + 0.03, box.y0, 0.025, box.height)))
    ticks = [value for value in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000) if value <= 10**top]
    bar.set_ticks([math.log10(value) for value in ticks], labels=[f"{value:g}" for value in ticks])
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=FONT_SIZE - 2, colors=MUTED, labelcolor=INK, length=2)
    return figure


def patching_figure(diagnoses: Mapping[str, StateDiagnosis], unit: str = "token") -> Figure:
    """Harm removed and added if the states of some heads are exchanged, with intervals over texts."""
    patchings = [diagnosis.patching for diagnosis in diagnoses.values() if diagnosis.patching is not None]
    heights = [0.27 * len(patching.groups) for patching in patchings]
    figure, panels = panels_of(
        diagnoses,
        f"Harm that heads do beyond training (nats per {unit})",
        "Orange: added when only these heads get a long context\nBlue: removed when only these get a short one",
        heights,
        left=1.3,
        beside=165.0,
    )
    values = [
        bound
        for patching in patchings
        for group in patching.groups
        for estimate in (group.restored, group.broken, patching.harm)
        for bound in (estimate.mean, estimate.low, estimate.high)
        if bound is not None
    ]
    low, high = min(0.0, *values), max(0.05, *values)
    for axes, patching in zip(panels, patchings, strict=True):
        places = np.arange(len(patching.groups))
        for offset, name, color in ((-0.19, "broken", DRIFT), (0.19, "restored", STEADY)):
            estimates = [getattr(group, name) for group in patching.groups]
            axes.barh(places + offset, [estimate.mean for estimate in estimates], 0.36, color=color)
            for place, estimate in zip(places + offset, estimates, strict=True):
                if estimate.low is not None and estimate.high is not None:
                    axes.plot([estimate.low, estimate.high], [place, place], color=INK, linewidth=1)
        axes.axvline(0, color=INK, linewidth=1)
        axes.axvline(patching.harm.mean, color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)))
        axes.set_yticks(places, [group.name for group in patching.groups])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(places) - 0.5, -0.5)
        axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_title(
            f"harm of all: {patching.harm.mean:z.2f}", loc="right", fontsize=FONT_SIZE - 1.5, color=MUTED, pad=3
        )
    _hide_inner_labels(panels)
    return figure


Curves = Callable[[StateDiagnosis, HeadStates], Sequence[float] | None]


def _head_figure(
    diagnoses: Mapping[str, StateDiagnosis],
    title: str,
    explanation: str,
    quantities: Mapping[str, Curves],
    logarithmic: bool,
    height: float = HEIGHT,
) -> Figure:
    """One line per head: orange and named if it drifts, else blue.

    A panel per model and quantity that it has, named by both; a model without any has one empty panel.
    """
    shown: dict[str, StateDiagnosis] = {}
    curves: list[list[tuple[LayerStates, HeadStates, Sequence[float]]]] = []
    for name, diagnosis in diagnoses.items():
        drawn = {
            quantity: [
                (layer, head, values) for layer, head in diagnosis.ranking if (values := curve(diagnosis, head))
            ]
            for quantity, curve in quantities.items()
        }
        for quantity, lines in ({quantity: lines for quantity, lines in drawn.items() if lines} or {"": []}).items():
            shown[name + quantity] = diagnosis
            curves.append(lines)
    explained = f"{explanation}.\nOrange: heads that drift (L0 H5: layer 0, head 5)"
    figure, panels = panels_of(shown, title, explained, [height] * len(shown))
    if logarithmic:
        _ratio_axes(panels, shown, [values for lines in curves for _, _, values in lines])
    else:
        _position_axes(panels, shown)
    for axes, diagnosis, lines in zip(panels, shown.values(), curves, strict=True):
        drifting = [line for line in lines if line[1].drifts]
        steady = [line for line in lines if not line[1].drifts]
        for kind, color, width in ((steady, STEADY, 1.2), (drifting, DRIFT, 1.6)):
            for _, _, values in kind[:: -(-len(kind) // DRAWN_HEADS) or 1]:
                axes.plot(diagnosis.positions, values, color=color, linewidth=width, alpha=0.85)
        most = int(NAMED_HEADS * height / HEIGHT)
        named = [(values[-1], _short_name(layer, head), DRIFT) for layer, head, values in drifting[:most]]
        if more := drifting[most:]:
            named.append((min(values[-1] for _, _, values in more), f"+{len(more)} more", DRIFT))
        if steady:
            text = f"{len(steady)} steady" if drifting else "none drifts"
            named.append((float(np.median([values[-1] for _, _, values in steady])), text, STEADY))
        label_ends(axes, named)
    return figure


def panels_of(
    diagnoses: Mapping[str, StateDiagnosis],
    title: str,
    explanation: str,
    heights: Sequence[float] | None = None,
    left: float = LEFT,
    beside: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """One named panel per model; `heights` in inches. The explanation is below the title, and `beside` points are left
    at the right of each name."""
    heights = heights or [HEIGHT] * len(diagnoses)
    total = TITLE + BOTTOM + sum(heights) + GAP * (len(heights) - 1)
    figure = Figure(figsize=(WIDTH, total))
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.06 / total, title, fontsize=FONT_SIZE, color=INK, va="top", parse_math=False)
    figure.text(0.02, 1 - 0.26 / total, explanation, fontsize=FONT_SIZE - 1.5, color=MUTED, va="top", parse_math=False)
    panels, top = [], total - TITLE
    for name, height in zip(diagnoses, heights, strict=True):
        box = (left / WIDTH, (top - height) / total, (WIDTH - left - RIGHT) / WIDTH, height / total)
        axes = plain_axes(figure, box)
        top -= height + GAP
        set_left_title(axes, name, weight="bold", beside=beside)
        panels.append(axes)
    return figure, panels


def _position_axes(panels: Sequence[Axes], diagnoses: Mapping[str, StateDiagnosis]) -> None:
    first = min(diagnosis.positions[_first_place(diagnosis)] for diagnosis in diagnoses.values())
    last = max(diagnosis.positions[-1] for diagnosis in diagnoses.values())
    for axes, diagnosis in zip(panels, diagnoses.values(), strict=True):
        position_axis(axes, first, last)
        mark_training_lengths(axes, [diagnosis.training_length])
    _hide_inner_labels(panels)


def _ratio_axes(
    panels: Sequence[Axes], diagnoses: Mapping[str, StateDiagnosis], curves: Sequence[Sequence[float]]
) -> None:
    """Axes of positions, and one logarithmic scale for the visible ratios."""
    _position_axes(panels, diagnoses)
    shown = [value for curve in curves for value in curve[_first_place(next(iter(diagnoses.values()))) :] if value > 0]
    low, high = min([0.5, *shown]) / 1.15, max([2.0, *shown]) * 1.3
    ticks = [value for power in range(-9, 10) for value in (10.0**power, 3 * 10.0**power) if low <= value <= high]
    for axes in panels:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}x"))


def _hide_inner_labels(panels: Sequence[Axes]) -> None:
    for axes in panels[:-1]:
        axes.set_xlabel("")


def _first_place(diagnosis: StateDiagnosis) -> int:
    """Index of the first visible position: an eighth of the training length."""
    places = [place for place, position in enumerate(diagnosis.positions) if position >= diagnosis.training_length / 8]
    return places[0]


def _relative(values: Sequence[float], diagnosis: StateDiagnosis) -> list[float]:
    """Values relative to the one at the last position inside the training length."""
    inside = [value for value, n in zip(values, diagnosis.positions, strict=True) if n <= diagnosis.training_length]
    return [value / inside[-1] if inside[-1] else math.nan for value in values]


def _cell_edges(positions: Sequence[int]) -> list[float]:
    logs = np.log2(positions)
    middle = (logs[1:] + logs[:-1]) / 2
    edges = np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]])
    return list(2**edges)


def _short_name(layer: LayerStates, head: HeadStates) -> str:
    return f"L{layer.layer} {'H' if layer.unit == 'head' else 'G'}{head.head}"
