"""Loss by position, excess loss from context, loss within the training length and the length verdict of one model.

The verdict is the length up to which a model generalizes. Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), Definition
3.2: with p* the lowest perplexity inside the training length, reached at t*, a model generalizes to T if ppl(t) <= p*
for all t in [t*, T] (the paper prints T_train there, but T is meant). Here the definition is applied to logarithmic
bins with a tolerance, to the means, and to bounds that hold in all bins together (`shown_above`).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.provenance import run_record
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import NOT_SAID, DataRecord
from hf_recurrent_lengthgen.evaluation.settings import CONFIDENCE, DEFAULTS, TOLERANCE, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import (
    bin_means,
    binned_curve,
    estimate,
    last_doubling,
    make_curve,
    perplexity,
    position_edges,
    shown_above,
)
from hf_recurrent_lengthgen.evaluation.streaming import Observer, Tokens, stream_nll
from hf_recurrent_lengthgen.metrics.context_harm.result import (
    ComparedModel,
    Comparison,
    ContextHarm,
    Difference,
    EvaluationResult,
    InWindow,
    LengthVerdict,
    TextMeans,
    TwoResolutions,
)
from hf_recurrent_lengthgen.metrics.context_harm.windows import WindowNll, context_use_bands, window_nll

EXACT_UNTIL, FINE_PER_DOUBLING = 256, 16
COARSE_PER_DOUBLING = 4
VERDICT_PER_DOUBLING = 2
"""Few, wide bins, because the noise of each bin enters the verdict."""


class StreamAndWindows(NamedTuple):
    """The data of all metrics of an evaluation: NLL in the stream (S, L), and in windows."""

    stream: np.ndarray
    windows: WindowNll


def evaluate_model(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    label: str = "model",
    data: DataRecord = NOT_SAID,
    settings: EvaluationSettings = DEFAULTS,
    *,
    observer: Observer | None = None,
    cache: ResultCache | None = None,
) -> EvaluationResult:
    """Position-wise NLL, excess loss from context, in-window NLL and the length verdict; 3 forward passes per token.

    The verdict judges later positions by the stream, and positions inside the training length by their mean over all
    windows, which is many times more precise than the single beginning of each sequence.

    Args:
        model: As in `stream_nll`.
        tokens: Token ids (S, L + 1): S held-out sequences, L > training_length positions each. Intervals require
            S >= 2, and excess loss at 32 to 64 training lengths requires L = 64 * training_length.
        training_length: Tokens per training sequence, T.
        label: Name of the model in tables and figures.
        data: Description of the tokens; the digest is always computed from `tokens`.
        settings: How the model is measured.
        observer: Sees the stream, also if the result is cached; a context manager is entered around the stream.
        cache: Cache of results.

    Raises:
        ValueError: as in `stream_nll` and `window_nll`.
    """
    task = Measurement(model, tokens, training_length, label, data, settings, cache)
    return evaluated(task, observer)


def evaluated(task: Measurement, observer: Observer | None = None) -> EvaluationResult:
    """The evaluation, made once; with an observer, the texts are read again, so that it sees the stream."""
    if task.evaluation is None or observer is not None:
        task.evaluation = _evaluate(task, observer)
    return task.evaluation


def _evaluate(task: Measurement, observer: Observer | None) -> EvaluationResult:
    settings, began = task.settings, time.perf_counter()

    def read_stream() -> np.ndarray:
        # an observer records the stream only, not the windows
        with observer if isinstance(observer, AbstractContextManager) else nullcontext():
            return stream_nll(task.model, task.tokens, observer=observer, **settings.reading).nll

    observed = None if observer is None else read_stream()

    def compute() -> EvaluationResult:
        stream = read_stream() if observed is None else observed
        read = StreamAndWindows(stream, window_nll(task.model, task.tokens, task.training_length, **settings.reading))
        return EvaluationResult(
            model=task.label,
            weights=task.key["model"]["weights"],
            training_length=task.training_length,
            evaluated_length=task.length,
            sequences=len(task.tokens),
            confidence=settings.confidence,
            data=task.data,
            **{name: measure(task, read) for name, measure in MEASURES.items()},
            device=str(task.reader.device),
            command="",
            seed=settings.seed,
            **run_record(task.model, began),
        )

    depends_on = {"harm": settings.harm_threshold, "verdict": settings.tolerance}
    result = task.kept("evaluation", EvaluationResult, compute, **depends_on)
    command, seed = settings.recorded_command, settings.seed
    return dataclasses.replace(result, model=task.label, data=task.data, command=command, seed=seed)


def _curves(task: Measurement, values: np.ndarray, first: int) -> TwoResolutions:
    """Both resolutions of values (S, L - first) at the positions from `first` on."""
    fine, coarse = (
        binned_curve(values, position_edges(task.length, task.training_length, *bins), first, task.settings.confidence)
        for bins in ((EXACT_UNTIL, FINE_PER_DOUBLING), (0, COARSE_PER_DOUBLING))
    )
    return TwoResolutions(fine, coarse)


def _context_harm(task: Measurement, read: StreamAndWindows) -> ContextHarm:
    trained, threshold = task.training_length, task.settings.harm_threshold
    harm = read.stream[:, trained:] - read.windows.truncated
    curves, (start, stop) = _curves(task, harm, trained), last_doubling(task.length, trained)
    bins, texts = curves.coarse, len(harm)
    harmful = shown_above(bins.mean, bins.low, threshold, texts, task.settings.confidence)
    return ContextHarm(
        curves=curves,
        last_range=(start, stop),
        last=estimate(harm[:, start - trained : stop - trained], task.settings.confidence),
        threshold=threshold,
        harmful_from=next((edge for edge, shown in zip(bins.edges, harmful, strict=False) if shown), None),
    )


def _in_window(task: Measurement, read: StreamAndWindows) -> InWindow:
    trained, confidence, inside = task.training_length, task.settings.confidence, read.windows.in_window
    early, late = context_use_bands(trained)
    return InWindow(
        curve=binned_curve(inside, position_edges(trained, trained, EXACT_UNTIL, FINE_PER_DOUBLING), 0, confidence),
        loss=estimate(inside, confidence),
        context_use=estimate(bin_means(inside, early) - bin_means(inside, late), confidence),
        early_band=early,
        late_band=late,
        windows_per_sequence=(task.length - trained) // (trained // 2) + 1,
    )


def _verdict(task: Measurement, read: StreamAndWindows) -> LengthVerdict:
    edges = position_edges(task.length, task.training_length, 0, VERDICT_PER_DOUBLING)
    border = edges.index(task.training_length)
    inside = bin_means(read.windows.in_window, edges[: border + 1])
    nll = np.concatenate([inside, bin_means(read.stream, edges[border:])], axis=1)
    return length_verdict(edges, nll, task.training_length, task.settings.tolerance, task.settings.confidence)


def _by_text(task: Measurement, read: StreamAndWindows) -> TextMeans:
    trained, (start, stop) = task.training_length, last_doubling(task.length, task.training_length)
    loss, truncated = read.stream[:, start:stop], read.windows.truncated[:, start - trained : stop - trained]
    means = (values.mean(1, dtype=np.float64).tolist() for values in (loss - truncated, loss, read.windows.in_window))
    return TextMeans(*map(tuple, means))


MEASURES: dict[str, Callable[[Measurement, StreamAndWindows], Any]] = {
    "position_wise": lambda task, read: _curves(task, read.stream, 0),
    "harm": _context_harm,
    "in_window": _in_window,
    "verdict": _verdict,
    "by_text": _by_text,
    "mean_perplexity": lambda task, read: _curves(task, perplexity(read.stream), 0),
}
"""Field of `EvaluationResult` -> how it is computed."""


def compare(
    base: EvaluationResult, *results: EvaluationResult, title: str = "Beyond the training length"
) -> Comparison:
    """Evaluations on the same texts together, with their differences from the base, see `differences`.

    Raises:
        ValueError: for other texts, and two models of one name.
    """
    models = (ComparedModel("base", base, None), *(ComparedModel("other", result, None) for result in results))
    return Comparison(title, models, differences(models))


def differences(models: Sequence[ComparedModel]) -> tuple[Difference, ...]:
    """Each model minus the first base, or else the first model, text by text (`TextMeans`).

    A method with several seeds is compared as one: by the means over texts of the seeds that both have, seed by seed,
    or of each of its seeds with a model that has none. A method without such a seed is left out.
    """
    methods: dict[str, dict[str, ComparedModel]] = {}
    for model in models:
        if model.evaluation.by_text is not None:
            methods.setdefault(model.method or model.evaluation.model, {})[model.seed] = model
    bases = [name for name, seeds in methods.items() if next(iter(seeds.values())).role == "base"]
    reference, *names = dict.fromkeys([*bases[:1], *methods]) or [""]
    pairs = {name: _pairs(methods[name], methods[reference]) for name in names}
    return tuple(_difference(name, reference, pairs[name]) for name in names if pairs[name])


def _pairs(
    models: dict[str, ComparedModel], references: dict[str, ComparedModel]
) -> list[tuple[ComparedModel, ComparedModel]]:
    """The models of two methods, by seed, that are compared."""
    if "" in models or "" in references:
        return list(product(models.values(), references.values()))
    return [(models[seed], references[seed]) for seed in models if seed in references]


def _difference(name: str, minus: str, pairs: Sequence[tuple[ComparedModel, ComparedModel]]) -> Difference:
    estimates, over = {}, "texts" if len(pairs) == 1 else "seeds"
    for quantity in (field.name for field in dataclasses.fields(TextMeans)):
        read = attrgetter(f"evaluation.by_text.{quantity}")
        values = np.array([np.subtract(read(model), read(reference)) for model, reference in pairs])  # pairs, texts
        values = values.T if over == "texts" else values.mean(1, keepdims=True)
        estimates[quantity] = estimate(values, pairs[0][0].evaluation.confidence)
    return Difference(name, minus, over, len(values), **estimates)  # type: ignore[arg-type]


def length_verdict(
    edges: Sequence[int],
    nll: np.ndarray,
    training_length: int,
    tolerance: float = TOLERANCE,
    confidence: float = CONFIDENCE,
) -> LengthVerdict:
    """Judge a position-wise NLL by Definition 3.2.

    Args:
        edges: Bin edges (n + 1,); the training length must be one of them.
        nll: Mean NLL of each sequence in each bin, (S, n), nats per token.
        training_length: T_train in tokens; p* is sought in the bins below it.
        tolerance: Fraction by which perplexity may exceed p*.
        confidence: Two-sided confidence of the paired intervals, and of `violated_from`.
    """
    border = list(edges).index(training_length)
    best = int(nll[:, :border].mean(0).argmin())
    excess = make_curve(edges, nll - nll[:, best : best + 1], confidence)
    allowed = math.log1p(tolerance)
    later = range(best + 1, len(edges) - 1)
    # The best bin was chosen by the same texts, among those that they do not show to be worse.
    rivals = sum(low <= 0 for low in (excess.low or ())[:border])
    bounds = None if excess.low is None else excess.low[best + 1 :]
    proven = shown_above(excess.mean[best + 1 :], bounds, allowed, len(nll), confidence, rivals)
    return LengthVerdict(
        best_bin=(edges[best], edges[best + 1]),
        best_nll=float(nll[:, best].mean()),
        excess=excess,
        tolerance=tolerance,
        holds_to=next((edges[i] for i in later if excess.mean[i] > allowed), edges[-1]),
        violated_from=next((edges[i] for i, shown in zip(later, proven, strict=True) if shown), None),
    )
