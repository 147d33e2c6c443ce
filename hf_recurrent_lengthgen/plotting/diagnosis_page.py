"""One self-contained HTML page of a diagnosis: how far models hold and why, then pictures, numbers and definitions."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.diagnosis_results import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.evaluation.results import ComparedModel, Role
from hf_recurrent_lengthgen.evaluation.state_results import StateDiagnosis, head_name
from hf_recurrent_lengthgen.plotting.diagnosis_findings import (
    constant_prompt_text,
    correlation_text,
    diagnosis_summary,
    distance_text,
    drift_text,
    drifting_group,
    facts,
    far_tokens,
    harm_share_text,
    not_measured,
    patching_text,
    remembrance_text,
    retention_text,
    verdicts,
)
from hf_recurrent_lengthgen.plotting.figures import context_harm_figure, in_window_figure, position_wise_figure
from hf_recurrent_lengthgen.plotting.findings import findings, interval_text
from hf_recurrent_lengthgen.plotting.names import figure_names, short_names, with_names
from hf_recurrent_lengthgen.plotting.page import HARM_CAPTION, STREAM_CAPTION, WINDOW_CAPTION
from hf_recurrent_lengthgen.plotting.page_parts import (
    Row,
    bands_text,
    card,
    cell,
    definitions,
    entry_list,
    evaluation_rows,
    html_page,
    page_colors,
    picture,
    provenance,
    table,
)
from hf_recurrent_lengthgen.plotting.remembrance import constant_prompt_figure, remembrance_figure
from hf_recurrent_lengthgen.plotting.states import (
    conv_std_figure,
    distance_map_figure,
    patching_figure,
    retention_figure,
    state_std_figure,
)

Draw = Callable[[Diagnosis], Figure | None]


class Picture(NamedTuple):
    """A figure of a page: how it is drawn (None where there is nothing to draw) and its caption."""

    draw: Draw
    caption: str


def _compared(draw: Callable[[Sequence[ComparedModel]], Figure]) -> Draw:
    return lambda diagnosis: draw(_for_figures(diagnosis).comparison.models)


def _of_states(draw: Callable[[Sequence[StateDiagnosis]], Figure], has: Callable[[StateDiagnosis], bool]) -> Draw:
    """A figure of those models whose states have what it shows."""

    def drawn(diagnosis: Diagnosis) -> Figure | None:
        models = _for_figures(diagnosis).models
        shown = [model.states for model in models if model.states is not None and has(model.states)]
        return draw(shown) if shown else None

    return drawn


def _drawn_by_name(
    draw: Callable[[dict[str, Any], Sequence[Role]], Figure], part: Callable[[DiagnosedModel], object | None]
) -> Draw:
    """A figure of those models that have a part."""

    def drawn(diagnosis: Diagnosis) -> Figure | None:
        models = [model for model in _for_figures(diagnosis).models if part(model) is not None]
        named = {model.evaluation.model: part(model) for model in models}
        return draw(named, [model.role for model in models]) if named else None

    return drawn


def _for_figures(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with names that fit into figures."""
    return with_names(diagnosis, figure_names(short_names(_names(diagnosis))))


def _names(diagnosis: Diagnosis) -> list[str]:
    return [model.evaluation.model for model in diagnosis.models]


def _has_heads(states: StateDiagnosis) -> bool:
    return bool(states.ranking)


HOLDS = {
    "context_harm": Picture(_compared(context_harm_figure), HARM_CAPTION),
    "position_wise": Picture(_compared(position_wise_figure), STREAM_CAPTION),
}
CAUSES = {
    "state_distance": Picture(
        _of_states(distance_map_figure, _has_heads),
        "Each row is a head, the furthest at the top. Orange: more than one standard deviation from training.",
    ),
    "state_patching": Picture(
        _of_states(patching_figure, lambda states: states.patching is not None),
        "States exchanged between a long and a short context. Blue up to the dashed line: all of the harm goes away. "
        "Thin lines: intervals.",
    ),
    "state_std": Picture(_of_states(state_std_figure, _has_heads), "A state that has settled has a flat line."),
    "state_retention": Picture(
        _of_states(retention_figure, lambda states: any(head.inputs for _, head in states.ranking)),
        "A head that still holds the first token adds up what it reads, rather than replacing it.",
    ),
}
FURTHER_CAUSES = {
    "conv_std": Picture(
        _of_states(conv_std_figure, lambda states: any(layer.conv for layer in states.layers)),
        "Convolution states hold the last tokens only: they show whether what enters a layer changes.",
    ),
}
REMEMBERED = {
    "remembrance": Picture(
        _drawn_by_name(remembrance_figure, lambda model: model.remembrance),
        "How far the prediction moves when all but the last tokens are left out. What is right of the training length "
        "comes from tokens further back than it.",
    )
}
REPEATED = {
    "constant_prompt": Picture(
        _drawn_by_name(constant_prompt_figure, lambda model: model.constant_prompt),
        "Loss on a text of one token over and over. Dotted: above this a model has failed.",
    )
}
INSIDE = {"in_window": Picture(_compared(in_window_figure), WINDOW_CAPTION)}
PICTURES = HOLDS | CAUSES | FURTHER_CAUSES | REMEMBERED | REPEATED | INSIDE

BANDED = HOLDS | INSIDE | REMEMBERED
"""Figures with bands of the intervals over sequences."""

DIAGNOSIS_FIGURES: dict[str, Draw] = {name: picture.draw for name, picture in PICTURES.items()}
"""Name of a figure -> function that draws it, or returns None where there is nothing to draw."""


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The HTML text of a page that needs nothing but itself, in light and dark, for desktop and phone.

    Models that are paths are called by the last part of it; the whole is in the list of how all was made.
    """
    given = _names(diagnosis)
    diagnosis = with_names(diagnosis, short_names(given))
    colors = page_colors(diagnosis.comparison)
    found = findings(diagnosis.comparison)
    lead = "".join(
        f"<p><b>{escape(verdict.headline)}</b> {escape(verdict.reason)}</p>" for verdict in verdicts(diagnosis)
    )
    cards = "".join(
        card(finding, color, entry_list(facts(model)))
        for finding, color, model in zip(found, colors, diagnosis.models, strict=True)
    )
    details = {finding.model.evaluation.model: finding.detail for finding in found}
    sections = [
        f"<h1>{escape(diagnosis.title)}</h1>",
        f'<div class="lead">{lead}</div>',
        f'<div class="cards">{cards}</div>',
        _section(diagnosis, "How far it holds", HOLDS, lambda model: [details[model.evaluation.model]]),
        _section(diagnosis, "Why: the states", CAUSES, _states_texts, FURTHER_CAUSES),
        _section(diagnosis, "What it remembers", REMEMBERED, _remembrance_texts),
        _section(diagnosis, "One token over and over", REPEATED, _constant_texts),
        _section(diagnosis, "Inside the training length", INSIDE, _inside_texts),
    ]
    if diagnosis.correlation is not None:
        sections += [
            "<h2>Over the models</h2>",
            f"<p>{escape(correlation_text(diagnosis.correlation))}</p>",
        ]
    sections += ["<h2>Numbers</h2>", table(diagnosis.models, colors, _rows(diagnosis))]
    if missing := not_measured(diagnosis):
        sections += ["<h2>Not measured</h2>", _list(missing)]
    evaluations = [model.evaluation for model in diagnosis.models]
    sections += [
        "<h2>What the words mean</h2>",
        *(f'<p class="note">{escape(text)}</p>' for text in [definitions(evaluations[0]), *_definitions(diagnosis)]),
        "<h2>How this was made</h2>",
        provenance(evaluations, given),
    ]
    return html_page(diagnosis.title, sections)


def _section(
    diagnosis: Diagnosis,
    title: str,
    pictures: dict[str, Picture],
    texts: Callable[[DiagnosedModel], Sequence[str]],
    further: dict[str, Picture] | None = None,
) -> str:
    """A heading, figures, and what is said of each model; nothing where there is neither."""
    figures, more = _figures(diagnosis, pictures), _figures(diagnosis, further or {})
    said = [
        f"<div><h3>{escape(model.evaluation.model)}</h3>{''.join(f'<p>{escape(words)}</p>' for words in found)}</div>"
        for model in diagnosis.models
        if (found := texts(model))
    ]
    if not figures and not said:
        return ""
    if len(figures) % 2:  # the text stands in the free place
        figures, said = [*figures, f"<div>{''.join(said)}</div>"], []
    return (
        f"<section><h2>{escape(title)}</h2>{_pairs(figures)}{_pairs(said)}"
        + (f"<details><summary>More pictures</summary>{_pairs(more)}</details>" if more else "")
        + "</section>"
    )


def _figures(diagnosis: Diagnosis, pictures: dict[str, Picture]) -> list[str]:
    bands, summary = bands_text(diagnosis.models[0].evaluation), diagnosis_summary(diagnosis)
    return [
        picture(figure, name, caption + (bands if name in BANDED else ""), f"{caption} {summary}")
        for name, (draw, caption) in pictures.items()
        if (figure := draw(diagnosis)) is not None
    ]


def _pairs(parts: Sequence[str]) -> str:
    return f'<div class="pair">{"".join(parts)}</div>' if parts else ""


def _states_texts(model: DiagnosedModel) -> list[str]:
    states = model.states
    told = () if states is None else (drift_text(states), retention_text(states), patching_text(states))
    return [words for words in told if words]


def _remembrance_texts(model: DiagnosedModel) -> list[str]:
    return [] if model.remembrance is None else [remembrance_text(model.remembrance)]


def _constant_texts(model: DiagnosedModel) -> list[str]:
    return [] if model.constant_prompt is None else [constant_prompt_text(model.constant_prompt)]


def _inside_texts(model: DiagnosedModel) -> list[str]:
    evaluation, misalignment = model.evaluation, model.misalignment
    told = [f"Loss {interval_text(evaluation.in_window.loss)} nats per {evaluation.data.token_unit}."]
    return told if misalignment is None else [*told, f"Long-short misalignment {interval_text(misalignment)} nats."]


def _list(sentences: Sequence[str]) -> str:
    return f'<ul class="note">{"".join(f"<li>{escape(words)}</li>" for words in sentences)}</ul>'


ABSENT = "<small>not measured</small>"


def _rows(diagnosis: Diagnosis) -> list[Row[DiagnosedModel]]:
    """The numbers of the evaluation, and those of each part that some model has."""
    models, unit = diagnosis.models, diagnosis.models[0].evaluation.data.token_unit
    rows: list[Row[DiagnosedModel]] = evaluation_rows(models)
    if any(model.states for model in models):
        rows += [
            Row("Heads that drift", "of all; the furthest, in standard deviations of training", _drift_cell),
            Row(
                "Harm of a long context's state",
                f"against that of a short one, nats per {unit}",
                lambda model: (
                    cell(model.states.patching.harm, sign=True) if model.states and model.states.patching else ABSENT
                ),
            ),
            Row("Removed", "with states of a short context in the heads that drift", _removed_cell),
        ]
    if any(model.remembrance for model in models):
        rows.append(Row("Effective Remembrance", "of tokens beyond the training length, 0 to 1", _remembrance_cell))
    if any(model.misalignment for model in models):
        rows.append(
            Row(
                "Long-short misalignment",
                "inside the training length, nats",
                lambda model: cell(model.misalignment) if model.misalignment else ABSENT,
            )
        )
    if any(model.constant_prompt for model in models):
        rows.append(Row("Constant prompt", "highest loss beyond the training length, and inside", _constant_cell))
    return rows


def _drift_cell(model: DiagnosedModel) -> str:
    states = model.states
    if states is None or not states.ranking:
        return ABSENT
    layer, head = states.ranking[0]
    furthest = f"{head_name(layer, head)}: {distance_text(head)}"
    return f"<b>{len(states.drifting):,} of {len(states.ranking):,}</b><small>{escape(furthest)}</small>"


def _removed_cell(model: DiagnosedModel) -> str:
    states = model.states
    if states is None or states.patching is None:
        return ABSENT
    group = drifting_group(states)
    if group is None:
        return "<small>none drifts</small>"
    if not states.patching.harmful:
        return "<small>no harm shown</small>"
    return f"{cell(group.restored, sign=True)}<small>{harm_share_text(states.patching, group.restored)}</small>"


def _remembrance_cell(model: DiagnosedModel) -> str:
    beyond = far_tokens(model.remembrance)
    return ABSENT if beyond is None else cell(beyond)


def _constant_cell(model: DiagnosedModel) -> str:
    found = model.constant_prompt
    return ABSENT if found is None else f"<b>{found.beyond:.3g}</b><small>{found.inside:.3g} inside</small>"


def _definitions(diagnosis: Diagnosis) -> list[str]:
    """What the words of the parts mean that some model has."""
    models, told = diagnosis.models, []
    if states := next((model.states for model in models if model.states is not None), None):
        told.append(
            "The distance of a head is the 2-Wasserstein distance between all elements of its states after so many "
            "tokens and those inside the second half of the training length, in standard deviations of the latter. A "
            "head drifts if its mean over the last octave of positions is above "
            f"{states.smallest_drift:g} and above what positions of training differ among themselves."
        )
    if patching := next((m.states.patching for m in models if m.states is not None and m.states.patching), None):
        told.append(
            f"Heads are exchanged between the state after {patching.position:,} tokens and the state that the last "
            f"{patching.kept:,} of them leave alone; the next {patching.width:,} tokens are scored. Harm is the loss "
            "from the former minus that from the latter. Where several heads fail at once, mending one may mend "
            "little, so shares need not add up to 100%."
        )
    if any(model.remembrance for model in models):
        told.append(
            "Effective Remembrance (arXiv:2507.02782, Definition 3.3) is the total variation between the predictions "
            "after all tokens and after the last ones only: 0 where the tokens before make no difference, at most 1. "
            "A model that breaks is moved by far tokens in vain; one that holds may do so by forgetting them. Whether "
            "it finds what stands far back is measured by lengthgen retrieve."
        )
    if any(model.misalignment for model in models):
        told.append(
            "Long-short misalignment is the symmetric cross-entropy of the predictions after the same text cut a "
            "little shorter. It is not 0 for equal predictions: compare models on the same text."
        )
    if any(model.constant_prompt for model in models):
        told.append(
            "The constant prompt is one token over and over (the “newlines” prompt of arXiv:2410.07145, section 4): "
            "easy text, on which some models fail whose states overflow. To hold on it does not acquit a model."
        )
    return told
