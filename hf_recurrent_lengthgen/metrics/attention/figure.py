"""The harm of long recurrent states and of long attention in hybrids, each alone and both, by length."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.metrics.states.figure import panels_of
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.plotting.style import (
    INK,
    MUTED,
    ROLE_COLORS,
    draw_band,
    label_ends,
    mark_training_lengths,
    position_axis,
)

CASES = {"both": MUTED, "recurrent": ROLE_COLORS["base"], "attention": ROLE_COLORS["cured"]}
NAMES = {"both": "both", "recurrent": "states", "attention": "attention"}


def attention_harm_figure(diagnoses: Mapping[str, StateDiagnosis], unit: str = "token") -> Figure:
    """One panel per hybrid, with a line and a band for the states alone, attention alone, and both."""
    shown = {name: states for name, states in diagnoses.items() if states.attention is not None}
    figure, panels = panels_of(
        shown,
        f"Harm of a long context (nats per {unit})",
        "Orange: only the recurrent states are long. Blue: only attention is.\nGray: both are",
    )
    harms = [each.attention for each in shown.values() if each.attention is not None]
    values = [
        bound
        for each in harms
        for case in CASES
        for estimate in getattr(each, case)
        for bound in (estimate.mean, estimate.low, estimate.high)
        if bound is not None
    ]
    low, high = min(0.0, *values), max(0.05, *values)
    first, last = min(each.borders[0] for each in harms), max(each.borders[-1] for each in harms)
    for axes, diagnosis, each in zip(panels, shown.values(), harms, strict=True):
        axes.axhline(0, color=INK, linewidth=1)
        ends = []
        for case, color in CASES.items():
            estimates = getattr(each, case)
            marker = "o" if len(estimates) == 1 else None
            axes.plot(each.borders, [value.mean for value in estimates], color=color, linewidth=2, marker=marker)
            draw_band(axes, each.borders, estimates, color)
            ends.append((estimates[-1].mean, NAMES[case], color))
        position_axis(axes, min(first, diagnosis.training_length) / 1.1, last)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
        mark_training_lengths(axes, [diagnosis.training_length])
        label_ends(axes, ends)
        axes.set_xlabel("Tokens read" if axes is panels[-1] else "", fontsize=10, color=MUTED)
    return figure
