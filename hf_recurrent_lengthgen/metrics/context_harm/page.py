"""What pages show of evaluations: figures, cards, numbers, and how they were made."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.formatting import cell, number_text, range_text, tokens
from hf_recurrent_lengthgen.metrics.context_harm.figure import (
    context_harm_figure,
    in_window_figure,
    position_wise_figure,
)
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.summary import Finding
from hf_recurrent_lengthgen.plotting.html import Row, entry_list

MARKS = {"fails": "✕", "generalizes": "✓", "inconclusive": "?"}


class Picture(NamedTuple):
    """A figure of evaluations: the function that draws it, and its caption."""

    draw: Callable[[Sequence[ComparedModel]], Figure]
    caption: str


PICTURES = {
    "position_wise": Picture(
        position_wise_figure,
        "Position-wise perplexity, exp of the mean loss, in one long stream read from the zero state. Text difficulty "
        "varies with position.",
    ),
    "context_harm": Picture(
        context_harm_figure,
        "Excess loss from context: the loss after the whole text minus the loss of the same tokens after at most the "
        "training length. Above zero, the earlier text makes predictions worse.",
    ),
    "in_window": Picture(
        in_window_figure,
        "Loss by position inside the training length, from the zero state. It falls if a model uses its context.",
    ),
}
"""Name of a figure -> the figure."""


def card(finding: Finding, color: str, details: str) -> str:
    evaluation = finding.model.evaluation
    return (
        f'<div class="card" style="border-color:{color}">'
        f'<div class="status"><b style="color:{color}">{MARKS[finding.status]}</b> {finding.status}</div>'
        f"<h3>{escape(finding.headline)}</h3>"
        f'<div class="big">{number_text(evaluation.harm.last.mean, "+.2f")} '
        f"<small>nats per {escape(evaluation.data.token_unit)}, excess loss from context</small></div>"
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
            "Excess loss from context",
            f"{range_text(first.harm.last_range)}, nats per {unit}",
            lambda model: cell(model.evaluation.harm.last, sign=True),
        ),
        Row(
            f"Excess loss above {first.harm.threshold:g} from",
            "first bin shown to be above it, tokens; with more sequences, an earlier bin may be shown",
            lambda model: model.evaluation.harm.onset,
        ),
        Row(
            "Loss within the training length",
            f"windows from the zero state, nats per {unit}",
            lambda model: cell(model.evaluation.in_window.loss),
        ),
        Row(
            "Context use",
            f"loss at {range_text(early)} minus at {range_text(late)}",
            lambda model: cell(model.evaluation.in_window.context_use, sign=True),
        ),
        Row(
            f"Mean perplexity more than {tolerance} above its best from",
            "Definition 3.2, tokens; also where the texts get harder",
            lambda model: tokens(_mean_above(model.evaluation), "nowhere"),
        ),
        Row(
            f"The same, with {first.confidence:.0%} confidence",
            "tokens",
            lambda model: tokens(model.evaluation.verdict.violated_from, "nowhere"),
        ),
    ]


def _mean_above(evaluation: EvaluationResult) -> int | None:
    """The position from which the mean perplexity is above its best, if there is one."""
    place = evaluation.verdict.holds_to
    return place if place < evaluation.evaluated_length else None


def definitions(evaluation: EvaluationResult) -> str:
    start, stop = evaluation.verdict.best_bin
    unit = evaluation.data.token_unit
    return (
        f"{'' if unit == 'token' else f'A token is a {unit} here. '}"
        f"Intervals are {evaluation.confidence:.0%} t-intervals over {evaluation.sequences} sequences, paired for "
        "differences. A model fails if the interval of its excess loss from context in the last doubling of the "
        f"position is above {evaluation.harm.threshold:g}, generalizes if it is at or below and the sequences have at "
        "least two training lengths, and is inconclusive otherwise. The first bin above a limit is named with this "
        "confidence for all bins together; the band in a figure is for each bin alone, so it may leave the limit "
        "earlier, and other sequences may name another bin. "
        "Definition 3.2 is from Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), applied to logarithmic position bins: "
        f"after the best bin inside the training length (for {evaluation.model}: positions {start:,} to {stop:,}), "
        "perplexity must not rise by more than the tolerance. It cannot distinguish a model that gets worse from "
        "texts that get harder, so the verdict above is by excess loss and may differ."
    )


def provenance(evaluations: Sequence[EvaluationResult], full_names: Sequence[str]) -> str:
    """How the evaluations were made; pages show `full_names` of models here only."""
    first = evaluations[0]
    seconds = sum(evaluation.wall_seconds for evaluation in evaluations)
    renamed = [
        f"{evaluation.model}: {name}"
        for evaluation, name in zip(evaluations, full_names, strict=True)
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
