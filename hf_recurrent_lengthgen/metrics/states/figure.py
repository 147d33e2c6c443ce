"""Figures of the states of one or several models: which heads leave the training distribution, and their excess loss.

Every figure has one panel per model (name -> states), stacked and on the same scale. Drifting heads are orange.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.states.result import HeadStates, StateDiagnosis
from hf_recurrent_lengthgen.plotting import style

DRIFT, STEADY = style.ROLE_COLORS["base"], style.ROLE_COLORS["intervention"]
CASES = {"both": ("both", style.MUTED), "recurrent": ("states", DRIFT), "attention": ("attention", STEADY)}
"""Field of `AttentionHarm` -> label and color."""
NAMED_HEADS = 6
"""Maximum number of heads named beside a panel."""
MAP_ROWS = 24
"""Maximum number of heads in a panel of the map of distances."""
DRAWN_HEADS = 40
"""Maximum number of heads of each kind, drifting or not, that have a line."""
ORANGE = "Orange: heads that drift (L0 H5: layer 0, head 5)"
WIDTH, HEIGHT, LEFT, RIGHT, TITLE, BOTTOM, GAP = 4.95, 1.75, 0.7, 1.05, 0.8, 0.55, 0.5
"""Inches."""
Diagnoses = Mapping[str, StateDiagnosis]
Curve = Callable[[StateDiagnosis, HeadStates], Sequence[float]]
INPUTS: dict[str, Curve] = {
    "largest element": lambda its, head: _relative(head.largest, its),
    "steps": lambda its, head: _relative(head.inputs.get("step", ()), its),
    "keys": lambda its, head: _relative(head.inputs.get("key", ()), its),
    "values": lambda its, head: _relative(head.inputs.get("value", ()), its),
}
"""Panels of `state_inputs_figure`."""


def state_std_figure(diagnoses: Diagnoses) -> Figure:
    """Standard deviation of each head's state, of the whole state and of convolution states, relative to that at the
    training length, by position (Buitrago Ruiz and Gu, 2025, Figures 4, 9; Chen et al., 2024, Figures 5, 16, 17)."""
    explanation = "Orange: heads that drift. Dashed: the whole state.\nDotted: convolutions"
    curves: dict[str, Curve] = {"": lambda its, head: _relative(head.std, its)}
    title = "Standard deviation of each head's state"
    return _curves_figure(diagnoses, curves, title, explanation, "relative to that at T", _ratios, whole=True)


def state_inputs_figure(diagnoses: Diagnoses) -> Figure:
    """Largest element of each head's state and inputs of its recurrence, relative to those at the training length, by
    position (Chen et al., 2024, Figures 6 and 7); a panel for each that is known."""
    explanation = "Means since the previous position.\nOrange: heads that drift"
    title = "Largest element of each head's state, and its inputs"
    return _curves_figure(diagnoses, INPUTS, title, explanation, "relative to that at T", _ratios)


def state_mean_figure(diagnoses: Diagnoses) -> Figure:
    """Mean of each head's state, in its standard deviations at the training length, by position (Buitrago Ruiz and Gu,
    2025, appendix C; Chen et al., 2024, Figures 5 and 16)."""
    explanation = f"In its standard deviations at T, the training length.\n{ORANGE}"
    curves: dict[str, Curve] = {"": lambda its, head: _relative(head.mean, its, head.std)}
    return _curves_figure(diagnoses, curves, "Mean of each head's state", explanation, "standard deviations", _signed)


def retention_figure(diagnoses: Diagnoses) -> Figure:
    """The retention of the first token in each head, alpha_{2:n}, by position (Chen et al., 2024, Figure 3); heads
    whose scan is not known are left out."""
    explanation = f"1: all of what the token wrote; 0: nothing.\n{ORANGE}"
    curves: dict[str, Curve] = {"": lambda _, head: [math.exp(log) for log in head.log_retention or ()]}
    title = "Retention of the first token in each head"
    return _curves_figure(diagnoses, curves, title, explanation, "share", _shares)


def rank_figure(diagnoses: Diagnoses) -> Figure:
    """Effective rank of each head's state, or of the one matrix of a layer, as a share of the largest possible,
    counted and by entropy, by position (Sun et al., 2026, Figure 1)."""
    drawn = {f"{name}: {kind}": (its, kind) for name, its in diagnoses.items() for kind in ("counted", "entropy")}
    shown = {name: diagnosis for name, (diagnosis, _) in drawn.items()}
    title = "Effective rank of each head, as a share of the largest"
    figure, panels = _panels(shown, title, f"Dashed: one for each token that was read.\n{ORANGE}", "share")
    _position_axes(panels, shown)
    for axes, (diagnosis, kind) in zip(panels, drawn.values(), strict=True):
        _shares(axes, ())
        drifting = {(head.layer, place) for head in diagnosis.drifting for place in (head.head, None)}
        lines = [(rank, [value / rank.most for value in getattr(rank, kind)]) for rank in diagnosis.ranks]
        lines.sort(key=lambda line: line[1][-1])
        for rank, shares in lines[:: -(-len(lines) // DRAWN_HEADS)]:
            color = DRIFT if (rank.layer, rank.head) in drifting else STEADY
            axes.plot(diagnosis.positions, shares, color=color, linewidth=1.2, alpha=0.85)
        tokens = [min(1.0, n / lines[0][0].most) for n in diagnosis.positions]
        axes.plot(diagnosis.positions, tokens, color=style.INK, linewidth=1, linestyle=(0, (4, 2)))
        ends = {f"L{rank.layer}" + ("" if rank.head is None else f" H{rank.head}"): shares for rank, shares in lines}
        style.label_ends(axes, [(ends[name][-1], name, style.MUTED) for name in {*list(ends)[:1], *list(ends)[-1:]}])
    return figure


def _ratios(axes: Axes, shown: Sequence[float]) -> None:
    above = [value for value in shown if value > 0]
    low, high = min([0.5, *above]) / 1.15, max([2.0, *above]) * 1.3
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = [value for power in range(-9, 10) for value in (10.0**power, 3 * 10.0**power) if low <= value <= high]
    style.set_ticks(axes.yaxis, ticks, "{:,g}x".format)


def _signed(axes: Axes, shown: Sequence[float]) -> None:
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(1.3 * min([-1.0, *shown]), 1.3 * max([1.0, *shown]))
    powers = [10.0**power for power in range(10)]
    style.set_ticks(axes.yaxis, [*(-power for power in powers), 0.0, *powers], "{:,g}".format)


def _shares(axes: Axes, _: Sequence[float]) -> None:
    axes.set_ylim(0, 1.2)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])


def _curves_figure(
    diagnoses: Diagnoses,
    curves: Mapping[str, Curve],
    title: str,
    explanation: str,
    y_label: str,
    scale: Callable[[Axes, Sequence[float]], None],
    whole: bool = False,
) -> Figure:
    """A panel per model and named curve with a line per head that has it: orange and named if it drifts, else blue.

    `scale` sets the vertical axis by the visible values of all panels. `whole` adds the spreads of the whole state,
    dashed, and of convolution states, dotted.
    """
    drawn = {
        f"{name}: {what}" if what else name: (diagnosis, curve)
        for name, diagnosis in diagnoses.items()
        for what, curve in curves.items()
        if not what or any(curve(diagnosis, head) for head in diagnosis.heads)
    }
    shown_by = {name: diagnosis for name, (diagnosis, _) in drawn.items()}
    figure, panels = _panels(shown_by, title, explanation, y_label)
    _position_axes(panels, shown_by)
    shown = [
        value
        for diagnosis, curve in drawn.values()
        for values in [*(curve(diagnosis, head) for head in diagnosis.heads), *(_spreads(diagnosis) if whole else ())]
        for value in values[_first_place(diagnosis) :]
        if math.isfinite(value)
    ]
    for axes, (diagnosis, curve) in zip(panels, drawn.values(), strict=True):
        scale(axes, shown)
        ends = []
        if whole:
            std, *conv = _spreads(diagnosis)
            axes.plot(diagnosis.positions, std, color=style.INK, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
            ends.append((std[-1], "whole", style.INK))
            for spread in conv[:DRAWN_HEADS]:
                axes.plot(diagnosis.positions, spread, color=style.MUTED, linewidth=1, linestyle=":")
        lines = [(head, values) for head in diagnosis.ranking if (values := curve(diagnosis, head))]
        drifting = [line for line in lines if line[0].drifts]
        steady = [line for line in lines if not line[0].drifts]
        for kind, color, width in ((steady, STEADY, 1.2), (drifting, DRIFT, 1.6)):
            for _, values in kind[:: -(-len(kind) // DRAWN_HEADS) or 1]:
                axes.plot(diagnosis.positions, values, color=color, linewidth=width, alpha=0.85)
        ends += [(values[-1], _short_name(head), DRIFT) for head, values in drifting[:NAMED_HEADS]]
        if more := drifting[NAMED_HEADS:]:
            ends.append((min(values[-1] for _, values in more), f"+{len(more)} more", DRIFT))
        if steady:
            none = "none drifts" if diagnosis.names_heads else "drift unknown"
            text = f"{len(steady)} steady" if drifting else none
            ends.append((float(np.median([values[-1] for _, values in steady])), text, STEADY))
        style.label_ends(axes, ends)
    return figure


def distance_map_figure(diagnoses: Diagnoses) -> Figure:
    """Distance of each head's states from those inside the training length, by position, worst heads first.

    Colors change at a distance of 1 standard deviation, on a logarithmic scale.
    """
    ranked = [diagnosis.ranking[:MAP_ROWS] for diagnosis in diagnoses.values()]
    figure, panels = _panels(
        diagnoses,
        "How far each head's states are from those in training",
        "Wasserstein distance, in standard deviations of training.\nDashed: training length (L0 H5: layer 0, head 5)",
        "layer and head",
        [max(0.8, 0.19 * len(rows)) for rows in ranked],
        beside=180.0,
    )
    top = max(1.0, math.log10(max(max(head.distance) for rows in ranked for head in rows)))
    colors = LinearSegmentedColormap.from_list(
        "drift", [(0, "#f4f5f7"), (0.5, "#c9d7e4"), (0.501, "#fbd9b5"), (0.75, DRIFT), (1, "#6b2a00")]
    )
    norm = TwoSlopeNorm(0, -1, top)
    for axes, diagnosis, rows in zip(panels, diagnoses.values(), ranked, strict=True):
        first = _first_place(diagnosis)
        values = np.log10([np.maximum(head.distance[first:], 0.1) for head in rows])
        edges = _cell_edges(diagnosis.positions[first:])
        mesh = axes.pcolormesh(edges, np.arange(len(rows) + 1), values, cmap=colors, norm=norm, edgecolors="none")
        style.position_axis(axes, edges[0], edges[-1])
        axes.set_ylim(len(rows), 0)
        axes.set_yticks(np.arange(len(rows)) + 0.5, [_short_name(head) for head in rows])
        axes.tick_params(axis="y", length=0, labelsize=style.FONT_SIZE - 2)
        axes.grid(False)
        axes.axvline(diagnosis.training_length, color=style.INK, linewidth=1, linestyle=(0, (2, 2)))
        if left_out := len(diagnosis.heads) - len(rows):
            _remark(axes, f"and {left_out:,} nearer heads")
    _hide_inner_labels(panels)
    box = panels[0].get_position()
    bar = figure.colorbar(mesh, cax=figure.add_axes((box.x1 + 0.03, box.y0, 0.025, box.height)))
    ticks = [value for value in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000) if value <= 10**top]
    bar.set_ticks([math.log10(value) for value in ticks], labels=[f"{value:g}" for value in ticks])
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=style.FONT_SIZE - 2, colors=style.MUTED, labelcolor=style.INK, length=2)
    return figure


def patching_figure(diagnoses: Diagnoses, unit: str = "token") -> Figure:
    """Excess loss removed and added if the states of some heads are exchanged, with intervals over texts."""
    patchings = [diagnosis.patching for diagnosis in diagnoses.values() if diagnosis.patching is not None]
    figure, panels = _panels(
        diagnoses,
        f"Excess loss from heads beyond training (nats per {unit})",
        "Orange: added when only these heads get a long context\nBlue: removed when only these get a short one",
        "",
        [0.27 * len(patching.groups) for patching in patchings],
        left=1.3,
        beside=130.0,
    )
    low, high = _limits(
        estimate
        for patching in patchings
        for group in patching.groups
        for estimate in (group.restored, group.broken, patching.harm)
    )
    for axes, patching in zip(panels, patchings, strict=True):
        places = np.arange(len(patching.groups))
        for offset, name, color in ((-0.19, "broken", DRIFT), (0.19, "restored", STEADY)):
            estimates = [getattr(group, name) for group in patching.groups]
            axes.barh(places + offset, [estimate.mean for estimate in estimates], 0.36, color=color)
            for place, estimate in zip(places + offset, estimates, strict=True):
                if estimate.low is not None and estimate.high is not None:
                    axes.plot([estimate.low, estimate.high], [place, place], color=style.INK, linewidth=1)
        axes.axvline(0, color=style.INK, linewidth=1)
        axes.axvline(patching.harm.mean, color=style.MUTED, linewidth=1.2, linestyle=(0, (2, 2)))
        axes.set_yticks(places, [group.name for group in patching.groups])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(places) - 0.5, -0.5)
        axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=style.GRID, linewidth=0.7)
        _remark(axes, f"total: {patching.harm.mean:z.2f}")
    _hide_inner_labels(panels)
    return figure


def attention_harm_figure(diagnoses: Diagnoses, unit: str = "token") -> Figure:
    """Excess loss from states alone, from attention alone, and from both, with bands, in each hybrid."""
    figure, panels = _panels(
        diagnoses,
        "Excess loss from states and from attention",
        "Orange: long context for the states only. Blue: for attention\nonly. Gray: for both",
        f"nats per {unit}",
    )
    harms = [diagnosis.attention for diagnosis in diagnoses.values() if diagnosis.attention is not None]
    low, high = _limits(estimate for harm in harms for case in CASES for estimate in getattr(harm, case))
    first, last = min(harm.borders[0] for harm in harms), max(harm.borders[-1] for harm in harms)
    for axes, diagnosis, harm in zip(panels, diagnoses.values(), harms, strict=True):
        axes.axhline(0, color=style.INK, linewidth=1)
        ends = []
        for case, (name, color) in CASES.items():
            estimates = getattr(harm, case)
            marker = "o" if len(estimates) == 1 else None
            axes.plot(harm.borders, [value.mean for value in estimates], color=color, linewidth=2, marker=marker)
            style.draw_band(axes, harm.borders, estimates, color)
            ends.append((estimates[-1].mean, name, color))
        style.position_axis(axes, min(first, diagnosis.training_length) / 1.1, last)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
        style.mark_training_lengths(axes, [diagnosis.training_length])
        style.label_ends(axes, ends)
        axes.set_xlabel("Tokens read" if axes is panels[-1] else "", fontsize=10, color=style.MUTED)
    return figure


def attention_windows_figure(diagnoses: Diagnoses, unit: str = "token") -> Figure:
    """Excess loss by window of attention in each hybrid, with its band; the last place is full attention."""
    explanation = "Dot: largest window that is not worse than the best"
    figure, panels = _panels(diagnoses, "Excess loss by window of attention", explanation, f"nats per {unit}")
    results = [each.attention.windows for each in diagnoses.values() if each.attention and each.attention.windows]
    low, high = _limits(value for result in results for value in result.harm)
    numbers = [window for result in results for window in result.windows if window is not None]
    everything = 2 * max(numbers, default=1)
    for axes, diagnosis, result in zip(panels, diagnoses.values(), results, strict=True):
        axes.axhline(0, color=style.INK, linewidth=1)
        x = [window or everything for window in result.windows]
        axes.plot(x, [value.mean for value in result.harm], color=STEADY, linewidth=2)
        style.draw_band(axes, x, result.harm, STEADY)
        axes.plot([result.best or everything], [result.at(result.best).mean], "o", color=STEADY)
        style.length_axis(axes, sorted({*numbers, everything}), "tokens")
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: "full" if value == everything else style.short_number(value))
        )
        axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
        axes.set_xlabel("Window of attention (tokens)" if axes is panels[-1] else "", fontsize=10, color=style.MUTED)
        style.mark_training_lengths(axes, [diagnosis.training_length])
    return figure


def _panels(
    diagnoses: Diagnoses,
    title: str,
    explanation: str,
    y_label: str,
    heights: Sequence[float] | None = None,
    left: float = LEFT,
    beside: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """One named panel per model; `heights` in inches. The explanation is below the title, and `beside` points are left
    at the right of each name."""
    heights = heights or [HEIGHT] * len(diagnoses)
    total = TITLE + BOTTOM + sum(heights) + GAP * (len(heights) - 1)
    figure = Figure(figsize=(WIDTH, total))
    for y, text, smaller, color in ((0.06, title, 0.0, style.INK), (0.26, explanation, 1.5, style.MUTED)):
        size = style.FONT_SIZE - smaller
        figure.text(0.02, 1 - y / total, text, fontsize=size, color=color, va="top", parse_math=False)
    panels, top = [], total - TITLE
    for name, height in zip(diagnoses, heights, strict=True):
        box = (left / WIDTH, (top - height) / total, (WIDTH - left - RIGHT) / WIDTH, height / total)
        axes = style.plain_axes(figure, box)
        top -= height + GAP
        style.set_left_title(axes, name, weight="bold", beside=beside)
        axes.set_ylabel(y_label, fontsize=style.FONT_SIZE - 1.5, color=style.MUTED)
        panels.append(axes)
    return figure, panels


def _remark(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="right", fontsize=style.FONT_SIZE - 1.5, color=style.MUTED, pad=3)


def _limits(estimates: Iterable[Estimate]) -> tuple[float, float]:
    """The range of means and bounds, with 0 and 0.05."""
    bounds = [bound for e in estimates for bound in (e.mean, e.low, e.high) if bound is not None]
    return min(0.0, *bounds), max(0.05, *bounds)


def _position_axes(panels: Sequence[Axes], diagnoses: Diagnoses) -> None:
    first = min(diagnosis.positions[_first_place(diagnosis)] for diagnosis in diagnoses.values())
    last = max(diagnosis.positions[-1] for diagnosis in diagnoses.values())
    for axes, diagnosis in zip(panels, diagnoses.values(), strict=True):
        style.position_axis(axes, first, last)
        style.mark_training_lengths(axes, [diagnosis.training_length])
    _hide_inner_labels(panels)


def _hide_inner_labels(panels: Sequence[Axes]) -> None:
    for axes in panels[:-1]:
        axes.set_xlabel("")


def _first_place(diagnosis: StateDiagnosis) -> int:
    """Index of the first visible position: an eighth of the training length."""
    return next(place for place, n in enumerate(diagnosis.positions) if n >= diagnosis.training_length / 8)


def _relative(values: Sequence[float], diagnosis: StateDiagnosis, to: Sequence[float] | None = None) -> list[float]:
    """Values relative to the one of `to`, or of theirs, at the last position inside the training length."""
    scale = (values if to is None else to)[diagnosis.last_inside] if values else 0.0
    return [value / scale if scale else math.nan for value in values]


def _spreads(diagnosis: StateDiagnosis) -> list[list[float]]:
    """Standard deviations of the whole state and of the parts of convolution states."""
    return [_relative(std, diagnosis) for std in (diagnosis.std, *(part.std for part in diagnosis.conv))]


def _cell_edges(positions: Sequence[int]) -> list[float]:
    logs = np.log2(positions)
    middle = (logs[1:] + logs[:-1]) / 2
    edges = np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]])
    return list(2**edges)


def _short_name(head: HeadStates) -> str:
    return f"L{head.layer} {'H' if head.unit == 'head' else 'G'}{head.head}"
