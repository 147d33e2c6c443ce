"""The figure of the effect of distant tokens on predictions."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from hf_recurrent_lengthgen.evaluation.results import Role
from hf_recurrent_lengthgen.metrics.remembrance.result import Remembrance
from hf_recurrent_lengthgen.plotting.style import (
    FONT_SIZE,
    MUTED,
    ROLE_LINES,
    draw_band,
    label_ends,
    mark_training_lengths,
    new_axes,
    position_axis,
    role_colors,
)


def remembrance_figure(models: Mapping[str, Remembrance], roles: Sequence[Role]) -> Figure:
    """Change of predictions (total variation) if only the last tokens are kept, with intervals.

    Right of the training length it should be 0. `roles` are the roles of the models, for their colors.
    """
    figure, axes = new_axes("Change of the prediction (total variation)")
    ends = []
    for (name, result), role, color in zip(models.items(), roles, role_colors(roles), strict=True):
        x, values = [result.length - start for start in result.starts], result.total_variation
        axes.plot(x, [value.mean for value in values], color=color, linewidth=2, linestyle=ROLE_LINES[role])
        draw_band(axes, x, values, color)
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
