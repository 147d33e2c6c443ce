"""The findings of a comparison in sentences, which follow from the numbers, also if a method did not work."""

import math
from dataclasses import dataclass
from typing import Literal

from hf_recurrent_lengthgen.evaluation.formatting import interval_text, number_text, range_text
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison, EvaluationResult

Status = Literal["breaks", "holds", "unclear"]

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
    """Whether context beyond the training length hurts at the end of the evaluated positions.

    "breaks" if the interval of the last range's harm is above the threshold, "holds" if it is at or below,
    "unclear" if it contains the threshold or there is no interval.
    """
    harm = evaluation.harm
    if harm.last.low is None or harm.last.high is None:
        return "unclear"
    if harm.last.low > harm.threshold:
        return "breaks"
    return "holds" if harm.last.high <= harm.threshold else "unclear"


def findings(comparison: Comparison) -> list[Finding]:
    """One finding per model; an intervention and a control are judged against the first base of their window of
    attention, if there is one, and else against the first base."""
    bases = [model for model in comparison.models if model.role == "base"]
    found = []
    for model in comparison.models:
        window = model.evaluation.attention_window
        same = [base for base in bases if base.evaluation.attention_window == window and model.role != "base"]
        base = next(iter(same or bases), None)
        found.append(_finding(model, None if model is base else base))
    return found


def _finding(model: ComparedModel, base: ComparedModel | None) -> Finding:
    evaluation = model.evaluation
    verdict = status(evaluation)
    broken = None if base is None or status(base.evaluation) != "breaks" else base.evaluation
    name, length = evaluation.model, f"{evaluation.evaluated_length:,} tokens"
    onset = evaluation.harm.harmful_from
    headline = {
        "holds": f"{name} generalizes to {length}",
        "breaks": f"{name} fails" + (f" within {length}" if onset is None else f" beyond {onset:,} tokens"),
        "unclear": f"{name}: inconclusive at {length}",
    }[verdict]
    if evaluation.harm.last.low is None:
        headline = f"{name}: inconclusive at {length}, one sequence gives no interval"
    elif broken is not None and verdict != "unclear" and model.role in ("intervention", "control"):
        kept = evaluation.harm.last.mean / broken.harm.last.mean
        if verdict == "breaks":
            headline += ", with less excess loss" * (kept <= MOST)
        elif model.role == "control":
            headline = f"{name} generalizes to {length} too: more steps alone are enough"
        elif kept < HALF:
            headline = f"{name} restores length generalization to {length}"
    details = [_harm(evaluation)]
    if broken is not None:
        kept = evaluation.harm.last.mean / broken.harm.last.mean
        share = number_text(kept, ".0%") if kept > 0 else "none"
        details.append(f"That is {share} of the excess loss of {broken.model}.")
    if model.role == "intervention":
        details += [_cost(evaluation, base), _use(evaluation)]
    return Finding(model, verdict, headline, " ".join(filter(None, details)))


def _harm(evaluation: EvaluationResult) -> str:
    harm, kept = evaluation.harm, f"only the last {evaluation.training_length:,} tokens"
    return (
        f"At {range_text(harm.last_range)} the excess loss from context is {interval_text(harm.last, sign=True)} nats "
        f"per {evaluation.data.token_unit}: the loss after the whole text minus the loss after {kept}. The perplexity "
        f"is {math.exp(min(harm.last.mean, 700.0)):,.2f} times as high."
    )


def _cost(evaluation: EvaluationResult, base: ComparedModel | None) -> str:
    if base is None:
        return ""
    cost = evaluation.in_window.loss.mean - base.evaluation.in_window.loss.mean
    return (
        f"Inside the training length, its loss minus that of {base.evaluation.model} is {number_text(cost, '+.3f')}."
    )


def _use(evaluation: EvaluationResult) -> str:
    window = evaluation.in_window
    early, late = (sum(band) // 2 for band in (window.early_band, window.late_band))
    shown = window.context_use.low is not None and window.context_use.low > 0
    return (
        f"It {'still uses' if shown else 'is not shown to use'} its context: the loss around position {early:,} minus "
        f"that around {late:,} is {interval_text(window.context_use, sign=True)}."
    )
