"""The results of a card as Markdown: the verdict in words, tables with intervals, figures, and commands."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.checkpoints.cards.facts import Evidence, data_text, evaluations
from hf_recurrent_lengthgen.checkpoints.cards.markdown import code, escape, fence, link, table
from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate
from hf_recurrent_lengthgen.evaluation.words import interval_text, number_text
from hf_recurrent_lengthgen.metrics.context_harm.figure import context_harm_figure, position_wise_figure
from hf_recurrent_lengthgen.metrics.context_harm.page import definitions
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.words import status
from hf_recurrent_lengthgen.metrics.diagnosis.page import facts
from hf_recurrent_lengthgen.metrics.retrieval.figure import retrieval_accuracy_figure
from hf_recurrent_lengthgen.metrics.retrieval.result import RECALL_ACCURACY, RetrievalResult, Share

FIGURES, RESULTS = "figures", "results"
FOLDERS = "Folder names are those of the original run: replace them by your own folders or names on the Hub."
_TASKS = {"passkey": "Passkeys", "niah": "Needles in running text", "babilong": "BABILong"}


def result_files(evidence: Sequence[Evidence]) -> list[str]:
    """A file name per result: comparison.json, diagnosis.json, retrieval.json; the second of a kind ends in -2."""
    return _numbered([item.kind.removesuffix("_comparison") + ".json" for item in evidence])


def figures(evidence: Sequence[Evidence]) -> dict[str, Callable[[], Figure]]:
    """The figures of a card by file name."""
    made: list[tuple[str, Callable[[], Figure]]] = []
    for item in evidence:
        if models := item.compared:
            made += [
                ("position_wise.png", partial(position_wise_figure, models)),
                ("context_harm.png", partial(context_harm_figure, models)),
            ]
        if retrieved := item.retrieved:
            made.append(("retrieval.png", partial(retrieval_accuracy_figure, retrieved)))
    return dict(zip(_numbered([name for name, _ in made]), (make for _, make in made), strict=True))


COMPARED = {
    "base": "the base model, before post-training",
    "control": "the control model, post-trained without the cure",
}


def _numbered(names: Sequence[str]) -> list[str]:
    """The second "a.png" becomes "a-2.png"."""
    numbered = []
    for index, name in enumerate(names):
        count = names[: index + 1].count(name)
        stem, _, kind = name.rpartition(".")
        numbered.append(name if count == 1 else f"{stem}-{count}.{kind}")
    return numbered


def verdict(evidence: Sequence[Evidence], vocab_size: int | None) -> str:
    """A paragraph with the first evaluation of this checkpoint beyond its training length."""
    models = next(item.compared for item in evidence if item.compared)
    own = models[0].evaluation
    length, unit = own.training_length, own.data.token_unit
    start, stop = own.harm.last_range
    harm = (
        f"**{_headline(models, vocab_size)}** At positions {start:,} to {stop:,}, its loss with the whole text is "
        f"{_estimate(own.harm.last, sign=True)} nats per {unit} compared with only the last {length:,} {unit}s"
    )
    for model in models[1:]:
        if model.role in COMPARED:
            harm += f"; for {COMPARED[model.role]}, it is {_estimate(model.evaluation.harm.last, sign=True)}"
    lost = [sentence for result in retrieval_results(evidence) for sentence in not_found(result)[:1]]
    return " ".join([f"{harm}.", *(f"Retrieval falls short: {sentence}." for sentence in lost[:1])])


def _headline(models: Sequence[ComparedModel], vocab_size: int | None) -> str:
    own = models[0].evaluation
    harm, unit, end = own.harm, own.data.token_unit, own.evaluated_length
    beyond = f"beyond its training length of {own.training_length:,} {unit}s"
    verdict = status(own)
    if verdict == "breaks":
        return f"It fails {beyond}."
    if (guess := uniform_loss(own, vocab_size)) is not None:
        return f"It predicts no better than a uniform guess (loss {guess:.3f}), so nothing is known about it {beyond}."
    if verdict == "unclear":
        return f"It is unclear whether it holds {beyond}."
    if (low := own.in_window.context_use.low) is None or low <= 0:
        return f"Earlier text is not shown to harm it {beyond}, but it is not shown to use its context at all."
    if harm.harmful_from is not None:
        start, stop = harm.last_range
        return (
            f"It holds at positions {start:,} to {stop:,}, {beyond}, but earlier text harms it at some positions "
            f"from {harm.harmful_from:,} on."
        )
    if (risen := own.verdict.violated_from) is not None:
        return (
            f"Earlier text is not shown to harm it {beyond}, up to {end:,} {unit}s, but from {risen:,} on its "
            f"perplexity is more than {own.verdict.tolerance:.0%} above the best one inside."
        )
    if any(model.role == "base" and status(model.evaluation) == "holds" for model in models[1:]):
        return (
            f"It holds {beyond}, up to the {end:,} {unit}s that were tested, but so does the base model: there was "
            "nothing to cure."
        )
    return f"It works {beyond}: no harm by earlier text is shown at any position up to the {end:,} that were tested."


def generalizes(result: EvaluationResult, vocab_size: int | None) -> bool:
    """Whether it is shown to use its context, without harm by text beyond the training length."""
    used = result.in_window.context_use.low
    failed = result.harm.harmful_from is not None or result.verdict.violated_from is not None
    even = uniform_loss(result, vocab_size) is not None
    return status(result) == "holds" and not failed and not even and used is not None and used > 0


def uniform_loss(result: EvaluationResult, vocab_size: int | None) -> float | None:
    """Loss of a uniform guess in nats per token, if the model's loss is not below it; else None."""
    guess = math.log(vocab_size) if vocab_size else math.inf
    return guess if result.in_window.loss.mean >= guess else None


def not_found(result: RetrievalResult) -> list[str]:
    """A clause for each length at which retrieval fails."""
    return [
        f"at {length:,} {result.data.token_unit}s, "
        f"{share.accuracy:.0%} of its answers are right ({escape(result.task)})"
        for length, share in zip(result.lengths, result.by_length, strict=True)
        if share.accuracy is not None and share.accuracy < RECALL_ACCURACY
    ]


def comparison_section(item: Evidence, name: str, images: Sequence[str]) -> str:
    """Table, figures and data of an evaluation or diagnosis."""
    models = item.compared
    own = models[0].evaluation
    parts = [
        "### Loss on long texts",
        f"On {own.sequences} texts of {own.evaluated_length:,} {own.data.token_unit}s "
        f"({escape(data_text(own.data.source))}), in nats per {own.data.token_unit}, with {own.confidence:.0%} "
        "intervals in brackets:",
        table(_rows(models)),
        *_extra(item),
    ]
    if len(images) > 1:
        parts += [_image(images[1], "Harm of the extra context by position"), _HARM.format(own.training_length)]
    return "\n\n".join([*parts, escape(definitions(own)), _all_numbers(name)])


_HARM = (
    "Loss with the whole context minus loss of the same tokens with at most the last {:,} tokens of context: above "
    "zero, the earlier text harms."
)


def _image(name: str, description: str) -> str:
    return f"![{description}]({FIGURES}/{name})"


POSITION_WISE = _image("position_wise.png", "Loss by position in the text, beyond the training length")
"""The main figure."""


def _all_numbers(name: str) -> str:
    return f"All numbers: {link(code(f'{RESULTS}/{name}'), f'{RESULTS}/{name}')}."


def _rows(models: Sequence[ComparedModel]) -> list[list[str]]:
    measured = [model.evaluation for model in models]
    own = measured[0]
    start, stop = own.harm.last_range
    early, late = (sum(band) // 2 for band in (own.in_window.early_band, own.in_window.late_band))
    lengths = {evaluation.training_length for evaluation in measured}
    inside = f"inside {own.training_length:,} {own.data.token_unit}s" if len(lengths) == 1 else "inside its length"
    beyond = f"beyond {own.training_length:,}" if len(lengths) == 1 else "beyond its length"

    def row(title: str, read: Callable[[EvaluationResult], str]) -> list[str]:
        return [title, *map(read, measured)]

    return [
        ["", "**this model**", *(escape(evaluation.model) for evaluation in measured[1:])],
        row(f"Loss {inside}", lambda result: _cell(result.in_window.loss)),
        row(f"Loss at {start:,} to {stop:,}", lambda result: _number(mean_over(result, start, stop))),
        row(
            f"Harm of the context {beyond}, at {start:,} to {stop:,}",
            lambda result: _cell(result.harm.last, sign=True),
        ),
        row(
            f"Harm above {own.harm.threshold:g} from",
            lambda result: "nowhere" if result.harm.harmful_from is None else f"{result.harm.harmful_from:,}",
        ),
        row(
            f"Gain from context {inside}, position {early:,} to {late:,}",
            lambda result: _cell(result.in_window.context_use, sign=True),
        ),
        row(f"Perplexity more than {own.verdict.tolerance:.0%} above its best (Definition 3.2)", _rise),
    ]


def _rise(result: EvaluationResult) -> str:
    """The position from which perplexity is above the best one; the mean may exceed it before the bound does."""
    shown, mean = result.verdict.violated_from, result.verdict.holds_to
    if shown is None and mean >= result.evaluated_length:
        return "nowhere"
    place = "not shown" if shown is None else f"from {shown:,}"
    return place if mean == shown else f"{place}<br>(mean: from {mean:,})"


def mean_over(result: EvaluationResult, start: int, stop: int) -> float | None:
    """Mean loss of positions [start, stop), if the bins end there."""
    curve: Curve = result.position_wise.fine
    if not {start, stop} <= {*curve.edges}:
        curve = result.position_wise.coarse
    if not {start, stop} <= {*curve.edges}:
        return None
    bins = range(curve.edges.index(start), curve.edges.index(stop))
    return math.fsum(curve.mean[i] * (curve.edges[i + 1] - curve.edges[i]) for i in bins) / (stop - start)


def diagnosis_section(item: Evidence, name: str, images: Sequence[str]) -> str:
    """What a diagnosis adds to an evaluation in another section."""
    extra = _extra(item) or ["It adds nothing to the evaluation above."]
    return "\n\n".join(["### Diagnosis", *extra, _all_numbers(name)])


def _extra(item: Evidence) -> list[str]:
    """The facts that only a diagnosis has."""
    diagnosed = item.diagnosed
    if diagnosed is None:
        return []
    lines = [f"- {fact.sentence or escape(f'{fact.name}: {fact.value}.')}" for fact in facts(diagnosed)]
    lines += [f"- Not measured: {escape(what)} ({escape(why)})." for what, why in diagnosed.refused.items()]
    return ["\n".join(lines)] if lines else []


def retrieval_section(item: Evidence, name: str, images: Sequence[str]) -> str:
    """Right answers by length."""
    models = item.retrieved
    first = models[0]
    examples = f", with {first.shots} solved examples before each" if first.shots else ""
    rows = [[f"{first.data.token_unit}s", *(f"{length:,}" for length in first.lengths)]]
    rows += [
        [
            "**this model**" if model is first else escape(model.model),
            *(_share(share, model.confidence) for share in model.by_length),
        ]
        for model in models
    ]
    recalled = first.recall_length()
    reach = "at no length" if recalled is None else f"up to {recalled:,} {first.data.token_unit}s"
    parts = [
        f"### {_TASKS.get(first.task, escape(first.task))}",
        f"Right answers in percent by length, over all depths, with {first.confidence:.0%} intervals in brackets "
        f"(prompt: {escape(first.style)}{examples}). At least 95% are right {reach}.",
        table(rows),
        *(_image(image, "Right answers by length") for image in images),
        _all_numbers(name),
    ]
    return "\n\n".join(parts)


def commands_section(evidence: Sequence[Evidence]) -> str:
    """The commands behind the numbers, with seeds, devices and versions."""
    results = [evaluations(item.original)[item.own] for item in evidence]
    commands = list(dict.fromkeys(result.command for result in results if result.command))
    with_what = list(
        dict.fromkeys(
            f"seed {result.seed} on {escape(result.device)} with {escape(versions_text(result.versions))}"
            for result in results
        )
    )
    blocks = [fence("\n".join(commands), "bash"), FOLDERS] if commands else []
    return "\n\n".join([*blocks, f"Measured with {'; '.join(with_what)}."])


def versions_text(versions: dict[str, str]) -> str:
    """ "python 3.11, torch 2.13"."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


_estimate = partial(interval_text, bounds=" [{}, {}]")


def _cell(estimate: Estimate, sign: bool = False) -> str:
    """An estimate with its interval on a second line, which keeps the table narrow."""
    return interval_text(estimate, sign, "<br>[{}, {}]")


_NONE = "\N{EN DASH}"


def _number(value: float | None) -> str:
    return _NONE if value is None else number_text(value, ".3f")


def _share(share: Share, confidence: float) -> str:
    if share.accuracy is None:
        return _NONE
    low, high = share.interval(confidence)
    return f"{100 * share.accuracy:.0f}<br>[{100 * low:.0f}, {100 * high:.0f}]"


def retrieval_results(evidence: Sequence[Evidence]) -> list[RetrievalResult]:
    """The results of this checkpoint in all retrievals."""
    return [item.retrieved[0] for item in evidence if item.retrieved]


def own_evaluations(evidence: Sequence[Evidence]) -> list[EvaluationResult]:
    """The results of this checkpoint in all evaluations and diagnoses."""
    return [item.compared[0].evaluation for item in evidence if item.compared]
