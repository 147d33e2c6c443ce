"""The results of a card: what was measured of this checkpoint, the verdict and known failures in words, and tables."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from hf_recurrent_lengthgen.checkpoints.cards.facts import Evidence
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape, table
from hf_recurrent_lengthgen.evaluation.formatting import interval_text, number_text, tokens
from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.summary import status
from hf_recurrent_lengthgen.metrics.diagnosis.page import facts
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel
from hf_recurrent_lengthgen.metrics.retrieval.result import RECALL_ACCURACY, RetrievalResult, Share

COMPARED = {
    "base": "the base model, before post-training",
    "control": "the control model, post-trained without the intervention",
}
_NONE = "\N{EN DASH}"


def own_evaluations(evidence: Sequence[Evidence]) -> list[EvaluationResult]:
    """The results of this checkpoint in all evaluations and diagnoses."""
    return [item.compared[0].evaluation for item in evidence if item.compared]


def own_retrievals(evidence: Sequence[Evidence]) -> list[RetrievalResult]:
    """The results of this checkpoint in all retrievals."""
    return [item.retrieved[0] for item in evidence if item.retrieved]


def verdict(models: Sequence[ComparedModel], retrievals: Sequence[RetrievalResult], vocab_size: int | None) -> str:
    """A paragraph on how a checkpoint, the first of the models, does beyond its training length."""
    own = models[0].evaluation
    length, unit = own.training_length, own.data.token_unit
    start, stop = own.harm.last_range
    shown = partial(interval_text, sign=True, bounds=" [{}, {}]")
    text = (
        f"**{_headline(models, vocab_size)}** At positions {start:,} to {stop:,}, its excess loss from context (the "
        f"loss with the whole text minus the loss with at most the last {length:,} {unit}s) is {shown(own.harm.last)} "
        f"nats per {unit}"
    )
    for model in _references(models):
        text += f"; for {COMPARED[model.role]}, it is {shown(model.evaluation.harm.last)}"
    failures = [f" Retrieval falls short: {clause}." for result in retrievals for clause in not_found(result)[:1]]
    return f"{text}.{''.join(failures[:1])}"


def _references(models: Sequence[ComparedModel]) -> list[ComparedModel]:
    """The base and control that the first model is compared with: other weights, and its window of attention if some
    of them have it."""
    own, window = models[0], models[0].evaluation.attention_window
    references = [
        model
        for model in models[1:]
        if model.role in COMPARED and (model.role, model.evaluation.weights) != (own.role, own.evaluation.weights)
    ]
    return [model for model in references if model.evaluation.attention_window == window] or references


def _headline(models: Sequence[ComparedModel], vocab_size: int | None) -> str:
    own = models[0].evaluation
    beyond, end = f"beyond its training length of {own.training_length:,} {own.data.token_unit}s", own.evaluated_length
    if status(own) == "fails":
        return f"It fails {beyond}."
    if status(own) == "inconclusive":
        return f"Whether it generalizes {beyond} is inconclusive."
    if failures := known_failures(own, vocab_size):
        return f"It is not shown to generalize {beyond}: {failures[0]}."
    if any(model.role == "base" and status(model.evaluation) == "generalizes" for model in _references(models)):
        return (
            f"It generalizes {beyond}, up to the {end:,} {own.data.token_unit}s that were tested, but so does the "
            "base model: there was nothing to restore."
        )
    above = f"no excess loss above {own.harm.threshold:g} is shown"
    return f"It generalizes {beyond}: {above} at any position up to the {end:,} that were tested."


def generalizes(result: EvaluationResult, vocab_size: int | None) -> bool:
    """Whether it is shown to use its context, without excess loss from text beyond the training length."""
    return status(result) == "generalizes" and not known_failures(result, vocab_size)


def known_failures(result: EvaluationResult, vocab_size: int | None) -> list[str]:
    """A clause for each failure on long texts."""
    failures, start = [], result.harm.harmful_from
    if vocab_size and result.in_window.loss.mean >= (guess := math.log(vocab_size)):
        failures.append(f"its loss is not below {guess:.3f}, the loss of a uniform guess among all tokens")
    if status(result) == "fails":
        last = f"at most the last {result.training_length:,} {result.data.token_unit}s"
        place = f", from position {start:,} on" if start else ""
        failures.append(f"on longer texts it predicts worse than with {last}{place}")
    elif start is not None:
        failures.append(f"at some positions from {start:,} on, earlier text increases its loss")
    if result.verdict.violated_from is not None:
        failures.append(
            f"from position {result.verdict.violated_from:,} on, its perplexity is more than "
            f"{result.verdict.tolerance:.0%} above the best one inside its training length"
        )
    if result.in_window.context_use.low is None or result.in_window.context_use.low <= 0:
        failures.append("it is not shown to use the context inside its training length")
    return failures


def not_found(result: RetrievalResult) -> list[str]:
    """A clause for each length at which retrieval fails."""
    return [
        f"at {length:,} {result.data.token_unit}s, "
        f"{share.accuracy:.0%} of its answers are right ({escape(result.task)})"
        for length, share in zip(result.lengths, result.by_length, strict=True)
        if share.accuracy is not None and share.accuracy < RECALL_ACCURACY
    ]


def comparison_table(models: Sequence[ComparedModel]) -> str:
    """Evaluations of models, the first of which is this checkpoint."""
    measured = [model.evaluation for model in models]
    own = measured[0]
    (start, stop), rise = own.harm.last_range, own.verdict.tolerance
    early, late = (sum(band) // 2 for band in (own.in_window.early_band, own.in_window.late_band))
    rows: dict[str, Callable[[EvaluationResult], str]] = {
        "Training length": lambda result: f"{result.training_length:,}",
        "Loss inside it": lambda result: _cell(result.in_window.loss),
        f"Loss at {start:,} to {stop:,}": lambda result: (
            _NONE if (mean := mean_over(result, start, stop)) is None else number_text(mean, ".3f")
        ),
        f"Excess loss from context beyond it, at {start:,} to {stop:,}": lambda result: _cell(
            result.harm.last, sign=True
        ),
        f"Excess loss above {own.harm.threshold:g} from": lambda result: result.harm.onset,
        f"Context use: loss at position {early:,} minus at {late:,}": lambda result: _cell(
            result.in_window.context_use, sign=True
        ),
        f"Perplexity shown to be {rise:.0%} above its best from (Definition 3.2)": lambda result: tokens(
            result.verdict.violated_from, "nowhere"
        ),
    }
    head = ["", "**this model**", *(escape(evaluation.model) for evaluation in measured[1:])]
    return table([head, *([title, *map(read, measured)] for title, read in rows.items())])


def _cell(estimate: Estimate, sign: bool = False) -> str:
    """An estimate with its interval on a second line, which keeps the table narrow."""
    return interval_text(estimate, sign, "<br>[{}, {}]")


def mean_over(result: EvaluationResult, start: int, stop: int) -> float | None:
    """Mean loss of positions [start, stop), if the bins end there."""
    curve: Curve = result.position_wise.fine
    if not {start, stop} <= {*curve.edges}:
        curve = result.position_wise.coarse
    if not {start, stop} <= {*curve.edges}:
        return None
    bins = range(curve.edges.index(start), curve.edges.index(stop))
    return math.fsum(curve.mean[i] * (curve.edges[i + 1] - curve.edges[i]) for i in bins) / (stop - start)


def retrieval_table(models: Sequence[RetrievalResult]) -> str:
    """Right answers by length, of this checkpoint first."""
    first = models[0]
    rows = [[f"{first.data.token_unit}s", *(f"{length:,}" for length in first.lengths)]]
    for model in models:
        name = "**this model**" if model is first else escape(model.model)
        rows.append([name, *(_share(share, model.confidence) for share in model.by_length)])
    return table(rows)


def _share(share: Share, confidence: float) -> str:
    if share.accuracy is None:
        return _NONE
    low, high = share.interval(confidence)
    return f"{100 * share.accuracy:.0f}<br>[{100 * low:.0f}, {100 * high:.0f}]"


def diagnosis_list(diagnosed: DiagnosedModel) -> str:
    lines = [escape(f"{name}: {value}.") for name, value in facts(diagnosed).items()]
    lines += [f"Not measured: {escape(what)} ({escape(why)})." for what, why in diagnosed.refused.items()]
    return "\n".join(f"- {line}" for line in lines) or "It adds nothing to the evaluation."
