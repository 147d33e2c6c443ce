"""Effective Remembrance as a part of a diagnosis."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from hf_recurrent_lengthgen.evaluation.formatting import interval_text
from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import Role
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings
from hf_recurrent_lengthgen.metrics.part import Part, Picture
from hf_recurrent_lengthgen.metrics.remembrance.measure import LENGTHS_OF_TRAINING, Remembrance, effective_remembrance
from hf_recurrent_lengthgen.plotting import style

NAMES = {"total_variation": "total variation", "jensen_shannon": "Jensen-Shannon", "cosine": "1 - cosine"}
"""Names of distances in figures."""
OTHER_DISTANCES = (
    "Other distances of the two predictions (Appendix G there), also from 0 to 1: the Jensen-Shannon distance is the "
    "square root of the divergence in bits; the cosine similarity of the probabilities is taken from 1."
)


def _compute(task: Measurement) -> Remembrance:
    settings, subject = task.settings, (task.model, task.tokens, task.training_length)
    assert isinstance(settings, DiagnosisSettings)
    length, names = min(LENGTHS_OF_TRAINING * task.training_length, task.length + 1), settings.remembrance_distances
    return task.kept(
        "remembrance",
        Remembrance,
        lambda: effective_remembrance(*subject, settings, length=length, distances=names),
        distances=sorted(names),
    )


def remembrance_figure(models: Mapping[str, Remembrance], roles: Sequence[Role]) -> Figure:
    """Change of predictions after only the last tokens, with intervals; a panel for each distance that a model has
    (Buitrago Ruiz and Gu, 2025, Figures 1 and 13).

    Right of the training length it should be 0. `roles` are the roles of the models, for their colors.
    """
    names = [name for name in NAMES if any(name in result.distances for result in models.values())]
    titles = [f"Change of the prediction ({NAMES[name]})" for name in names]
    figure, panels = style.stacked_axes(titles, 3.2 if len(names) == 1 else 2.4)
    for name, axes in zip(names, panels, strict=True):
        _draw(axes, models, roles, name)
    for axes in panels[:-1]:
        axes.set_xlabel("")
    return figure


def _draw(axes: Axes, models: Mapping[str, Remembrance], roles: Sequence[Role], distance: str) -> None:
    """The curves of the models that have this distance."""
    ends, tallest = [], 0.0
    for (name, result), role, color in zip(models.items(), roles, style.role_colors(roles), strict=True):
        if distance not in result.distances:
            continue
        x, values = [result.length - start for start in result.starts], result.distances[distance]
        axes.plot(x, [value.mean for value in values], color=color, linewidth=2, linestyle=style.ROLE_LINES[role])
        style.draw_band(axes, x, values, color)
        # all curves end at 0, where the context is whole, so labels have the order at one training length
        place = min(range(len(x)), key=lambda index: abs(x[index] - result.training_length))
        ends.append((values[place].mean, name, color))
        tallest = max(tallest, *(value.high or value.mean for value in values))
    axes.set_ylim(0, min(1.0, 0.2 * math.ceil(5.5 * tallest + 1e-9)) or 0.2)
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    style.position_axis(axes, 1, max(result.length for result in models.values()))
    style.mark_training_lengths(axes, [result.training_length for result in models.values()])
    axes.set_xlabel("Length of the truncated context", fontsize=style.FONT_SIZE - 0.5, color=style.MUTED)
    style.label_ends(axes, ends)


def remembrance_text(result: Remembrance) -> str:
    if (beyond := result.beyond_training) is None:
        return f"Texts of {result.length:,} tokens do not show the effect of tokens beyond the training length."
    return (
        f"At {result.length:,} tokens, the tokens before the last {result.training_length:,} change the prediction by "
        f"{interval_text(beyond)}, on a scale from 0 to 1."
    )


def _facts(result: Remembrance) -> Mapping[str, str]:
    beyond = result.beyond_training
    return {} if beyond is None else {"Effective Remembrance": interval_text(beyond)}


REMEMBRANCE = Part(
    name="remembrance",
    title="Effective Remembrance",
    summary="how much distant tokens change predictions (Effective Remembrance)",
    compute=_compute,
    section="What it remembers",
    texts=lambda result, unit: (remembrance_text(result),),
    facts=_facts,
    pictures={
        "remembrance": Picture(
            lambda result, roles, unit: remembrance_figure(result, roles),
            "Change of the prediction if the context is truncated to the last tokens. To the right of the training "
            "length, it is the effect of tokens further back than that.",
            bands=True,
        )
    },
    definitions=lambda results: (
        "Effective Remembrance (Buitrago Ruiz and Gu, 2025, Definition 3.3) is the total variation between the "
        "predictions after all tokens and after the last ones only: 0 if the earlier tokens make no difference, at "
        "most 1. Distant tokens change the predictions of a model that fails without helping it; one "
        "that generalizes may do so by forgetting them. lengthgen retrieve "
        "measures whether a model retrieves distant tokens.",
        *([OTHER_DISTANCES] if any(result.others for result in results) else []),
    ),
)
