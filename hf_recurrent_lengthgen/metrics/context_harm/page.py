"""What pages show of evaluations: figures, cards, numbers, and how they were made."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.words import cell, number_text, range_text, tokens
from hf_recurrent_lengthgen.metrics.context_harm.figure import (
    context_harm_figure,
    in_window_figure,
    position_wise_figure,
)
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison, EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.words import Finding
from hf_recurrent_lengthgen.plotting.html import VARIABLES, Row, entry_list
from hf_recurrent_lengthgen.plotting.style import role_colors

STATUS_MARKS = {"breaks": "✕", "holds": "✓", "unclear": "?"}


class Picture(NamedTuple):
    """A figure of evaluations: the function that draws it, and its caption."""

    draw: Callable[[Sequence[ComparedModel]], Figure]
    caption: str


PICTURES = {
    "position_wise": Picture(
        position_wise_figure,
        "Perplexity by position, exp of the mean loss, in one long stream read from the zero state. Text difficulty "
        "varies with position.",
    ),
    "context_harm": Picture(
        context_harm_figure,
        "Loss with the whole context minus loss of the same tokens with at most the training length of context. At "
        "zero, extra context does no harm.",
    ),
    "in_window": Picture(
        in_window_figure,
        "Loss by position inside the training length, from the zero state. It falls if a model uses its context.",
    ),
}
"""Name of a figure -> the figure."""


def page_colors(comparison: Comparison) -> list[str]:
    return [VARIABLES[color] for color in role_colors([model.role for model in comparison.models])]


def card(finding: Finding, color: str, details: str) -> str:
    evaluation = finding.model.evaluation
    return (
        f'<div class="card" style="border-color:{color}">'
        f'<div class="status"><b style="color:{color}">{STATUS_MARKS[finding.status]}</b> {finding.status}</div>'
        f"<h3>{escape(finding.headline)}</h3>"
        f'<div class="big">{number_text(evaluation.harm.last.mean, "+.2f")} '
        f"<small>nats per {escape(evaluation.data.token_unit)} of harm</small></div>"
        f"{details}</div>"
    )


def bands_text(evaluation: EvaluationResult) -> str:
    """Explanation of the bands in figures; empty for a single sequence."""
    many = evaluation.sequences > 1
    return f" Bands: {evaluation.confidence:.0%} intervals over {evaluation.sequences} sequences." if many else ""


def evaluation_rows(models: Sequence[Any]) -> list[Row]:
    """The numbers of evaluations; the remarks are those of the first one."""
    first = models[0].evaluation
    unit, tolerance = first.data.token_unit, f"{first.verdict.tolerance:.0%}"
    early, late = first.in_window.early_band, first.in_window.late_band
    return [
        Row("Training length", "tokens", lambda model: f"{model.evaluation.training_length:,}"),
        Row(
            "Context harm",
            f"{range_text(first.harm.last_range)}, nats per {unit}",
            lambda model: cell(model.evaluation.harm.last, sign=True),
        ),
        Row(
            f"Harm above {first.harm.threshold:g} from",
            "first bin shown to be above it, tokens",
            lambda model: model.evaluation.harm.onset,
        ),
        Row(
            "In-window loss",
            f"positions inside the training length, nats per {unit}",
            lambda model: cell(model.evaluation.in_window.loss),
        ),
        Row(
            "Context use",
            f"loss at {range_text(early)} minus at {range_text(late)}",
            lambda model: cell(model.evaluation.in_window.context_use, sign=True),
        ),
        Row(
            "Definition 3.2 holds to",
            f"raw loss by position, {tolerance} tolerance, tokens; also depends on how hard the texts get",
            lambda model: f"{model.evaluation.verdict.holds_to:,}",
        ),
        Row(
            "Definition 3.2 fails from",
            "same, with intervals, tokens",
            lambda model: tokens(model.evaluation.verdict.violated_from, "not shown"),
        ),
    ]


def definitions(evaluation: EvaluationResult) -> str:
    start, stop = evaluation.verdict.best_bin
    return (
        f"Intervals are {evaluation.confidence:.0%} t-intervals over {evaluation.sequences} sequences, paired for "
        "harm, context use and failure. A model breaks if the interval of its harm is above "
        f"{evaluation.harm.threshold:g}, holds if it is at or below, and is on the border otherwise. "
        "The first bin of harm or failure is named with this confidence for all bins together, so its own interval "
        "may be above the limit earlier. "
        "Definition 3.2 is from Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), applied to logarithmic position bins: "
        f"after the best bin inside the training length (for {evaluation.model}: positions {start:,} to {stop:,}), "
        "perplexity must not rise by more than the tolerance. It cannot distinguish a model that gets worse from "
        "texts that get harder, so with few texts harm is more informative."
    )


def provenance(evaluations: Sequence[EvaluationResult], given: Sequence[str] | None = None) -> str:
    """How the evaluations were made; `given` are the full names of the models if the page shortens them."""
    first = evaluations[0]
    seconds = sum(evaluation.wall_seconds for evaluation in evaluations)
    renamed = [
        f"{evaluation.model}: {name}"
        for evaluation, name in zip(evaluations, given or [], strict=given is not None)
        if evaluation.model != name
    ]
    entries = [
        *([("Models", "; ".join(renamed))] if renamed else []),
        ("Command", _each(evaluations, lambda evaluation: evaluation.command)),
        ("Seed", _each(evaluations, lambda evaluation: str(evaluation.seed))),
        ("Data", f"{first.data.description}; {first.sequences} sequences of {first.evaluated_length:,} tokens"),
        ("SHA-256 of the token ids", first.data.digest),
        ("SHA-256 of the weights", _each(evaluations, lambda evaluation: evaluation.weights)),
        (
            "Versions",
            _each(evaluations, lambda evaluation: ", ".join(f"{k} {v}" for k, v in evaluation.versions.items())),
        ),
        ("Device", _each(evaluations, lambda evaluation: evaluation.device)),
        ("Evaluation time", f"{seconds:,.0f} s for {len(evaluations)} model{'s' * (len(evaluations) > 1)}"),
    ]
    return entry_list(entries)


def _each(evaluations: Sequence[EvaluationResult], read: Callable[[EvaluationResult], str]) -> str:
    values = {evaluation.model: read(evaluation) for evaluation in evaluations}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{label}: {value}" for label, value in values.items())
