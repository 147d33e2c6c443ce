"""One self-contained HTML page: to which length models generalize and why, then figures, numbers and definitions."""

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.formatting import interval_text, sentence
from hf_recurrent_lengthgen.metrics.context_harm.page import (
    PICTURES,
    bands_text,
    card,
    definitions,
    evaluation_rows,
    provenance,
)
from hf_recurrent_lengthgen.metrics.context_harm.summary import findings
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.part import INSIDE, Part
from hf_recurrent_lengthgen.metrics.parts import PARTS
from hf_recurrent_lengthgen.plotting.html import VARIABLES, Row, entry_list, html_page, picture, table
from hf_recurrent_lengthgen.plotting.names import figure_names, short_names, with_names
from hf_recurrent_lengthgen.plotting.style import role_colors

LENGTH = "How far it generalizes"
SECTIONS = {"position_wise": LENGTH, "context_harm": LENGTH, "in_window": INSIDE}
"""Figure of an evaluation -> heading of its section."""
ABSENT = "<small>not measured</small>"


class Verdict(NamedTuple):
    """A model's result in a sentence, and its explanation by the parts, which may be empty."""

    headline: str
    reason: str


def facts(model: DiagnosedModel) -> dict[str, str]:
    """The key numbers of a model by name."""
    return {name: value for part, result in _parts(model) for name, value in part.facts(result).items()}


def verdicts(diagnosis: Diagnosis) -> list[Verdict]:
    verdicts = []
    for model, finding in zip(diagnosis.models, findings(diagnosis.comparison), strict=True):
        reason = "; ".join(why for part, result in _parts(model) if (why := part.reason(result, finding.status)))
        verdicts.append(Verdict(f"{finding.headline}.", sentence(reason) if reason else ""))
    return verdicts


def diagnosis_summary(diagnosis: Diagnosis) -> str:
    return " ".join(part for verdict in verdicts(diagnosis) for part in verdict if part)


def reasons(diagnosis: Diagnosis) -> list[str]:
    sentences = []
    for model in diagnosis.models:
        refused = [*model.refused.items()]
        refused += [(name, reason) for name, results in model.parts.items() for reason in results.left_out]
        refused += [(name, "measured by a part that is not installed") for name in model.parts if name not in PARTS]
        sentences += [f"{model.evaluation.model}, {name}: {reason}" for name, reason in refused]
    return sentences


def not_measured(diagnosis: Diagnosis) -> list[str]:
    requested = {name for model in diagnosis.models for name in (*model.parts, *model.refused)}
    left_out = [f"{part.title}: not requested." for name, part in PARTS.items() if name not in requested]
    return [*reasons(diagnosis), *(left_out if requested else [])]


def diagnosis_figures(diagnosis: Diagnosis) -> dict[str, Figure]:
    short = short_names([model.evaluation.model for model in diagnosis.models])
    named = with_names(diagnosis, figure_names(short))
    unit = diagnosis.models[0].evaluation.data.token_unit
    drawn = {name: PICTURES[name].draw(named.comparison.models) for name in SECTIONS}
    for part in PARTS.values():
        having = [model for model in named.models if part.name in model.parts]
        for name, shown in part.pictures.items():
            if models := [model for model in having if shown.shows(model.parts[part.name])]:
                results = {model.evaluation.model: model.parts[part.name] for model in models}
                drawn[name] = shown.draw(results, [model.role for model in models], unit)
    return drawn


def diagnosis_page(
    diagnosis: Diagnosis, loading: str | None = None, further: str = "", figures: Mapping[str, Figure] | None = None
) -> str:
    """The HTML text of a self-contained page, in light and dark, for desktop and phone.

    Paths of models are shortened to the last part; the section "How this was made" has them in full. `loading` is code
    that loads a checkpoint, shown as it is; `further` is HTML that follows the figures, and `figures` are its
    `diagnosis_figures`, if they were drawn before.
    """
    full_names = [model.evaluation.model for model in diagnosis.models]
    diagnosis = with_names(diagnosis, short_names(full_names))
    models = diagnosis.models
    colors = [VARIABLES[color] for color in role_colors([model.role for model in models])]
    lead = "".join(
        f"<p><b>{escape(verdict.headline)}</b> {escape(verdict.reason)}</p>" for verdict in verdicts(diagnosis)
    )
    cards = "".join(
        card(finding, color, entry_list([*facts(model).items()]))
        for finding, color, model in zip(findings(diagnosis.comparison), colors, models, strict=True)
    )
    sections = [
        f"<h1>{escape(diagnosis.title)}</h1>",
        f'<div class="lead">{lead}</div>',
        f'<div class="cards">{cards}</div>',
        *_sections(diagnosis, diagnosis_figures(diagnosis) if figures is None else figures),
        further,
    ]
    sections += ["<h2>Numbers</h2>", table(models, colors, [*evaluation_rows(models), *_rows(diagnosis)])]
    if missing := not_measured(diagnosis):
        entries = "".join(f"<li>{escape(words)}</li>" for words in missing)
        sections += ["<h2>Not measured</h2>", f'<ul class="note">{entries}</ul>']
    evaluations = [model.evaluation for model in models]
    sections += [
        "<h2>What the words mean</h2>",
        *(f'<p class="note">{escape(text)}</p>' for text in [definitions(evaluations[0]), *_definitions(diagnosis)]),
        "<h2>How this was made</h2>",
        provenance(evaluations, full_names),
    ]
    if loading is not None:
        sections += ["<h2>Load the checkpoint</h2>", f"<pre>{escape(loading)}</pre>"]
    return html_page(diagnosis.title, sections)


def _parts(model: DiagnosedModel) -> list[tuple[Part[Any], Any]]:
    return [(part, model.parts[name]) for name, part in PARTS.items() if name in model.parts]


def _sections(diagnosis: Diagnosis, figures: Mapping[str, Figure]) -> list[str]:
    """The sections of the evaluation and of the parts; the section inside the training length comes last."""
    bands, summary = bands_text(diagnosis.models[0].evaluation), diagnosis_summary(diagnosis)
    pictures: dict[str, tuple[str, str, bool]] = {
        name: (section, PICTURES[name].caption, True) for name, section in SECTIONS.items()
    }
    for part in PARTS.values():
        pictures |= {name: (part.section, p.caption, p.bands) for name, p in part.pictures.items()}
    shown: dict[str, list[str]] = {}
    for name, figure in figures.items():
        section, caption, banded = pictures[name]
        drawn = picture(figure, name, caption + (bands if banded else ""), f"{caption} {summary}")
        shown.setdefault(section, []).append(drawn)
    titles = [LENGTH, *(title for part in PARTS.values() if (title := part.section) not in (LENGTH, INSIDE)), INSIDE]
    return [_section(title, shown.get(title, []), _texts(diagnosis, title)) for title in dict.fromkeys(titles)]


def _texts(diagnosis: Diagnosis, title: str) -> list[str]:
    """The sentences about each model under a heading, as HTML; models without sentences are left out."""
    texts = []
    for model, finding in zip(diagnosis.models, findings(diagnosis.comparison), strict=True):
        evaluation = model.evaluation
        unit = evaluation.data.token_unit
        loss = f"Loss {interval_text(evaluation.in_window.loss)} nats per {unit}."
        sentences = [{LENGTH: finding.detail, INSIDE: loss}[title]] if title in (LENGTH, INSIDE) else []
        for part, result in _parts(model):
            if part.section == title:
                sentences += part.texts(result, unit)
        if sentences:
            paragraphs = "".join(f"<p>{escape(words)}</p>" for words in sentences)
            texts.append(f"<div><h3>{escape(evaluation.model)}</h3>{paragraphs}</div>")
    return texts


def _section(title: str, figures: list[str], texts: list[str]) -> str:
    """A heading, figures, and the sentences about each model; empty without figures and sentences."""
    if not figures and not texts:
        return ""
    if len(figures) % 2:  # the text fills the free place
        figures, texts = [*figures, f"<div>{''.join(texts)}</div>"], []
    return f"<section><h2>{escape(title)}</h2>{_pairs(figures)}{_pairs(texts)}</section>"


def _pairs(parts: Sequence[str]) -> str:
    return f'<div class="pair">{"".join(parts)}</div>' if parts else ""


def _rows(diagnosis: Diagnosis) -> list[Row]:
    def html(model: DiagnosedModel, name: str) -> str:
        return escape(facts(model).get(name, "")) or ABSENT

    names = dict.fromkeys(name for model in diagnosis.models for name in facts(model))
    return [Row(name, "", partial(html, name=name)) for name in names]


def _definitions(diagnosis: Diagnosis) -> list[str]:
    measured = [(part, [m.parts[name] for m in diagnosis.models if name in m.parts]) for name, part in PARTS.items()]
    return [text for part, results in measured if results for text in part.definitions(results)]
