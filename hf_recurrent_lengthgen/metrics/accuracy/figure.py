"""Accuracy on a task by the length of its strings."""

from collections.abc import Mapping
from itertools import cycle

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.plotting.style import LINE_COLORS, label_ends, length_axis, mark_training_lengths, new_axes


def accuracy_figure(
    curves: Mapping[str, Mapping[int, tuple[float, float]]], unit: str, training_length: int | None = None
) -> Figure:
    """Share of right symbols (solid) and of right answers (dashed) for several models.

    Args:
        curves: Model -> length in `unit` -> both shares, from 0 to 1; the lengths are the same for all models.
        training_length: The longest length in training, which is marked; None for no mark.
    """
    lengths = sorted(next(iter(curves.values())))
    figure, axes = new_axes("Accuracy: symbols (solid), whole answers (dashed)")
    axes.set_ylim(-0.03, 1.13)  # room for the mark above the lines
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    length_axis(axes, lengths, unit)
    ends = []
    for (name, curve), color in zip(curves.items(), cycle(LINE_COLORS), strict=False):
        for part, line in enumerate(("solid", (0, (4, 2)))):
            heights = [curve[length][part] for length in lengths]
            axes.plot(lengths, heights, color=color, linestyle=line, marker="o", markersize=3.5, linewidth=1.8)
        ends.append((curve[lengths[-1]][0], name, color))
    if training_length is not None:
        mark_training_lengths(axes, [training_length])
    label_ends(axes, ends)
    return figure
