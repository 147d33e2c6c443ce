"""The findings of a comparison in sentences, which follow from the numbers, also if a method did not work."""

import math
from dataclasses import dataclass
from typing import Literal

from hf_recurrent_lengthgen.evaluation.formatting import interval_text, number_text, range_text
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison, EvaluationResult

Status = Literal["fails", "generalizes", "inconclusive"]

MOST, HALF = 0.7, 0.5
"""State passing must leave less than HALF of the excess loss; a model with more than MOST of it has not reduced it."""


@dataclass(frozen=True)
class Finding:
    """One model's verdict in plain text: a status, a headline of a few words, and the sentences behind it."""

    model: ComparedModel
    status: Status
    headline: str
    detail: str


def status(evaluation: EvaluationResult) -> Status:
    """Whether a model generalizes to the end of the evaluated positions.

    "fails" if the interval of the excess loss over the last range is above the threshold, "generalizes" if it is at or
    below with sequences of at least two training lengths, else "inconclusive".
    """
    harm = evaluation.harm
    if harm.last.low is None or harm.last.high is None:
        return "inconclusive"
    if harm.last.low > harm.threshold:
        return "fails"
    return "generalizes" if harm.last.high <= harm.threshold and not too_short(evaluation) else "inconclusive"


def too_short(evaluation: EvaluationResult) -> bool:
    """Whether the texts are too short to show that a model generalizes: less than two training lengths."""
    return evaluation.evaluated_length < 2 * evaluation.training_length


def findings(comparison: Comparison) -> list[Finding]:
    """One finding per model; an intervention and a control are judged against the first base of their window of
    attention, if there is one, and else against the first base."""
    bases = [model for model in comparison.models if model.role == "base"]
    results = []
    for model in comparison.models:
        window = model.evaluation.attention_window
        same = [base for base in bases if base.evaluation.attention_window == window and model.role != "base"]
        base = next(iter(same or bases), None)
        results.append(_finding(model, None if model is base else base))
    return results


def _finding(model: ComparedModel, base: ComparedModel | None) -> Finding:
    evaluation, harm = model.evaluation, model.evaluation.harm
    verdict, name, length = status(evaluation), evaluation.model, f"{evaluation.evaluated_length:,} tokens"
    onset = "" if harm.harmful_from is None else f"{harm.harmful_from:,} tokens"
    short = ", less than two training lengths" if too_short(evaluation) else ""
    remark = ", one sequence gives no interval" if harm.last.low is None else short
    headline = {
        "generalizes": f"{name} generalizes to {length}",
        "fails": f"{name} fails beyond {onset}" if onset else f"{name} fails within {length}",
        "inconclusive": f"{name}: inconclusive at {length}{remark}",
    }[verdict]
    details = [
        f"At {range_text(harm.last_range)} the excess loss from context is {interval_text(harm.last, sign=True)} nats "
        f"per {evaluation.data.token_unit}: the loss after the whole text minus the loss after at most the last "
        f"{evaluation.training_length:,} tokens. So the earlier text multiplies the perplexity by "
        f"{math.exp(min(harm.last.mean, 700.0)):,.2f}."
    ]
    if base is not None and status(base.evaluation) == "fails":
        share = harm.last.mean / base.evaluation.harm.last.mean
        if verdict == "fails" and model.role in ("intervention", "control"):
            headline += ", with less excess loss" * (share <= MOST)
        elif verdict == "generalizes" and model.role == "control":
            headline = f"{name} generalizes to {length} too: more steps alone are enough"
        elif verdict == "generalizes" and model.role == "intervention" and share < HALF:
            headline = f"{name} restores length generalization to {length}"
        percent = number_text(max(share, 0.0), ".0%")
        details.append(f"The excess loss is {percent} of that of {base.evaluation.model}.")
    if base is not None and model.role == "control" and verdict == "fails" == status(base.evaluation):
        details.append("More steps alone are not enough.")
    if base is not None and model.role in ("intervention", "control"):
        cost = number_text(evaluation.in_window.loss.mean - base.evaluation.in_window.loss.mean, "+.3f")
        details.append(f"Inside the training length, its loss minus that of {base.evaluation.model} is {cost}.")
    return Finding(model, verdict, headline, " ".join([*details, _use(evaluation)]))


def _use(evaluation: EvaluationResult) -> str:
    window = evaluation.in_window
    early, late = (sum(band) // 2 for band in (window.early_band, window.late_band))
    shown = window.context_use.low is not None and window.context_use.low > 0
    effect = "lowers its loss" if shown else "is not shown to lower its loss"
    return (
        f"Inside the training length, more context {effect}: the loss around position {early:,} minus that around "
        f"{late:,} is {interval_text(window.context_use, sign=True)}."
    )
