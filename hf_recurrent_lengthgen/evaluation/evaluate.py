"""Loss by position, context harm, loss inside the training length and the length verdict of one model."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.context_harm import (
    WindowNll,
    check_training_length,
    context_use_bands,
    last_octave,
    window_nll,
)
from hf_recurrent_lengthgen.evaluation.json_schema import Document, to_json
from hf_recurrent_lengthgen.evaluation.length_generalization import TOLERANCE, length_verdict, make_curve
from hf_recurrent_lengthgen.evaluation.provenance import model_record, token_digest
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.result_cache import PartialResult, ResultCache
from hf_recurrent_lengthgen.evaluation.results import (
    ContextHarm,
    Curve,
    DataRecord,
    Estimate,
    EvaluationResult,
    ForgettingRule,
    InWindow,
    LengthVerdict,
    TwoResolutions,
)
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE, bin_means, position_edges, t_interval
from hf_recurrent_lengthgen.evaluation.streaming import Observer, Tokens, check_tokens, stream_nll
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.versions import installed_versions

HARM_THRESHOLD = 0.05
"""Harm in nats per token above which context counts as harmful."""
EXACT_UNTIL, FINE_PER_OCTAVE = 256, 16
COARSE_PER_OCTAVE = 4
VERDICT_PER_OCTAVE = 2
"""Few, wide bins, because the noise of each bin enters the verdict."""


BY_MEMORY = "(default: 4,096 tokens in all, 2,048 on a CPU, fewer with many logits)"


def option(default: Any, help: str) -> Any:
    """A field of settings that is also a command-line option."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is measured; fields with a help text are options of `lengthgen evaluate`.

    Attributes:
        batch_size, chunk_length: Rows, and tokens of each, per forward pass; None for what memory limits allow.
        harm_threshold: Nats per token; context is called harmful in a bin whose lower bound is above it.
        tolerance: Tolerance of the verdict, as a fraction of perplexity.
        confidence: Two-sided confidence of all intervals.
        seed: Seed of random draws; recorded.
        command: Recorded command of the evaluation; None for the command line of this process.
        progress: Show progress bars.
    """

    batch_size: int | None = option(None, f"texts or windows per forward pass {BY_MEMORY}")
    chunk_length: int | None = option(None, f"tokens of each text per forward pass {BY_MEMORY}")
    harm_threshold: float = HARM_THRESHOLD
    tolerance: float = TOLERANCE
    confidence: float = CONFIDENCE
    seed: int = 0
    command: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {self.confidence}.")

    @property
    def recorded_command(self) -> str:
        return " ".join(sys.argv) if self.command is None else self.command

    @property
    def reading(self) -> dict[str, Any]:
        """Batch size, chunk length and progress, as most metrics take them."""
        return {name: getattr(self, name) for name in ("batch_size", "chunk_length", "progress")}


DEFAULTS, NOT_SAID = EvaluationSettings(), DataRecord()


class Readings(NamedTuple):
    """The data of all metrics of an evaluation: NLL in the stream (S, L), and in windows."""

    stream: np.ndarray
    windows: WindowNll


class Measurement:
    """One model on checked token ids (S, L + 1), which every metric is computed from.

    Results are cached by `key`, which holds everything that they depend on.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        training_length: int,
        label: str,
        data: DataRecord,
        settings: EvaluationSettings,
        cache: ResultCache | None,
    ) -> None:
        check_training_length(training_length)
        self.model, self.training_length, self.label = model, training_length, label
        self.settings, self.cache = settings, cache
        self.reader = reader_of(model)
        self.tokens = check_tokens(tokens, self.reader.vocabulary, training_length + 1)
        self.length = self.tokens.shape[1] - 1
        self.data = dataclasses.replace(data, digest=token_digest(self.tokens))
        self.key: dict[str, Any] = {
            "model": model_record(model),
            "tokens": self.data.digest,
            "training_length": training_length,
            "confidence": settings.confidence,
            "pieces": [settings.batch_size, settings.chunk_length],
        }
        self._evaluation: EvaluationResult | None = None

    def kept(self, name: str, kind: type[Document], compute: Callable[[], Document], **depends_on: Any) -> Document:
        """A result from the cache, or computed and kept; it depends on `key` and `depends_on`."""
        if self.cache is None:
            return compute()
        key = {"result": name, **self.key, **depends_on}
        found: Document | None = self.cache.get(key, kind)
        if found is None:
            found = compute()
            self.cache.put(key, to_json(found))
        return found

    def partial(self, name: str, **depends_on: Any) -> PartialResult | None:
        return None if self.cache is None else self.cache.partial({"result": name, **self.key, **depends_on})

    def evaluate(self, observer: Observer | None = None) -> EvaluationResult:
        """The evaluation, made once; with an observer, the texts are read again, so that it sees the stream."""
        if self._evaluation is None or observer is not None:
            self._evaluation = _evaluate(self, observer)
        return self._evaluation


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
    """Position-wise NLL, context harm, in-window NLL and the length verdict; three forward passes per token.

    The verdict judges later positions by the stream, and positions inside the training length by their mean over all
    windows, which is many times more precise than the single beginning of each sequence.

    Args:
        model: As in `stream_nll`.
        tokens: Token ids (S, L + 1): S held-out sequences, L > training_length positions each. Intervals need S >= 2,
            and a last octave of harm at 32 to 64 training lengths needs L = 64 * training_length.
        training_length: Tokens per training sequence, T.
        label: Name of the model in tables and figures.
        data: Description of the tokens; the digest is always computed from `tokens`.
        settings: How the model is measured.
        observer: Sees the stream, also if the result is cached; a context manager is entered around the stream.
        cache: Where results are kept, and partial results after an interrupt.

    Raises:
        ValueError: as in `stream_nll` and `window_nll`.
    """
    return Measurement(model, tokens, training_length, label, data, settings, cache).evaluate(observer)


def _evaluate(task: Measurement, observer: Observer | None) -> EvaluationResult:
    settings, began = task.settings, time.perf_counter()
    depends_on = {"harm": settings.harm_threshold, "verdict": settings.tolerance}
    watched = None if observer is None else list(observer.positions)
    partials = {
        part: task.partial("evaluation", part=part, watched=watched, **depends_on) for part in Readings._fields
    }

    def read_stream() -> np.ndarray:
        # an observer records the stream only, not the windows
        with observer if isinstance(observer, AbstractContextManager) else nullcontext():
            return stream_nll(
                task.model, task.tokens, observer=observer, partial=partials["stream"], **settings.reading
            ).nll

    seen = None if observer is None else read_stream()

    def compute() -> EvaluationResult:
        stream = read_stream() if seen is None else seen
        windows = window_nll(
            task.model, task.tokens, task.training_length, partial=partials["windows"], **settings.reading
        )
        return EvaluationResult(
            model=task.label,
            weights=task.key["model"]["weights"],
            training_length=task.training_length,
            evaluated_length=task.length,
            sequences=len(task.tokens),
            confidence=settings.confidence,
            data=task.data,
            **{name: measure(task, Readings(stream, windows)) for name, measure in MEASURES.items()},
            device=str(task.reader.device),
            versions=installed_versions(),
            command="",
            seed=settings.seed,
            wall_seconds=time.perf_counter() - began,
            forgetting=ForgettingRule(**Forgetting.of(getattr(task.model, "config", None))._asdict()),
        )

    found = task.kept("evaluation", EvaluationResult, compute, **depends_on)
    for partial in partials.values():
        if partial is not None:
            partial.remove()
    command, seed = settings.recorded_command, settings.seed
    return dataclasses.replace(found, model=task.label, data=task.data, command=command, seed=seed)


def _curves(task: Measurement, values: np.ndarray, first: int) -> TwoResolutions:
    """Both resolutions of values (S, L - first) at the positions from `first` on."""
    fine, coarse = (
        binned_curve(values, position_edges(task.length, task.training_length, *bins), first, task.settings.confidence)
        for bins in ((EXACT_UNTIL, FINE_PER_OCTAVE), (0, COARSE_PER_OCTAVE))
    )
    return TwoResolutions(fine, coarse)


def _position_wise(task: Measurement, read: Readings) -> TwoResolutions:
    return _curves(task, read.stream, 0)


def _context_harm(task: Measurement, read: Readings) -> ContextHarm:
    trained, threshold = task.training_length, task.settings.harm_threshold
    harm = read.stream[:, trained:] - read.windows.truncated
    curves, (start, stop) = _curves(task, harm, trained), last_octave(task.length, trained)
    low = curves.coarse.low or ()
    return ContextHarm(
        curves=curves,
        last_range=(start, stop),
        last=estimate(harm[:, start - trained : stop - trained], task.settings.confidence),
        threshold=threshold,
        harmful_from=next(
            (edge for edge, bound in zip(curves.coarse.edges, low, strict=False) if bound > threshold), None
        ),
    )


def _in_window(task: Measurement, read: Readings) -> InWindow:
    trained, confidence, inside = task.training_length, task.settings.confidence, read.windows.in_window
    early, late = context_use_bands(trained)
    return InWindow(
        curve=binned_curve(inside, position_edges(trained, trained, EXACT_UNTIL, FINE_PER_OCTAVE), 0, confidence),
        loss=estimate(inside, confidence),
        context_use=estimate(bin_means(inside, early) - bin_means(inside, late), confidence),
        early_band=early,
        late_band=late,
        windows_per_sequence=(task.length - trained) // (trained // 2) + 1,
    )


def _verdict(task: Measurement, read: Readings) -> LengthVerdict:
    edges = position_edges(task.length, task.training_length, 0, VERDICT_PER_OCTAVE)
    border = edges.index(task.training_length)
    inside = bin_means(read.windows.in_window, edges[: border + 1])
    nll = np.concatenate([inside, bin_means(read.stream, edges[border:])], axis=1)
    return length_verdict(edges, nll, task.training_length, task.settings.tolerance, task.settings.confidence)


MEASURES: dict[str, Callable[[Measurement, Readings], Any]] = {
    "position_wise": _position_wise,
    "harm": _context_harm,
    "in_window": _in_window,
    "verdict": _verdict,
}
"""Field of `EvaluationResult` -> how it is found."""


def estimate(values: np.ndarray, confidence: float) -> Estimate:
    """Mean of values (S, n) with the interval of the sequences' means."""
    mean, low, high = t_interval(values.mean(1, dtype=np.float64), confidence)
    return Estimate(float(mean), None if low is None else float(low), None if high is None else float(high))


def binned_curve(values: np.ndarray, edges: Sequence[int], first: int, confidence: float) -> Curve:
    """The curve of values (S, n), whose first column is position `first`, on the edges from `first`."""
    kept = [edge for edge in edges if edge >= first]
    return make_curve(kept, bin_means(values, [edge - first for edge in kept]), confidence)
