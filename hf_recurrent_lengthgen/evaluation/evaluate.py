"""All length metrics of one model in one go."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.context_harm import (
    check_training_length,
    context_use_bands,
    last_octave,
    window_nll,
)
from hf_recurrent_lengthgen.evaluation.length_generalization import TOLERANCE, length_verdict, make_curve
from hf_recurrent_lengthgen.evaluation.provenance import installed_versions, model_record, token_digest
from hf_recurrent_lengthgen.evaluation.readers import vocabulary_size
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import (
    ContextHarm,
    Curve,
    DataRecord,
    Estimate,
    EvaluationResult,
    InWindow,
    TwoResolutions,
)
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE, bin_means, position_edges, t_interval
from hf_recurrent_lengthgen.evaluation.streaming import Observer, Tokens, check_tokens, stream_nll

HARM_THRESHOLD = 0.05
"""Harm in nats per token above which context counts as harmful."""
EXACT_UNTIL, FINE_PER_OCTAVE = 256, 16
COARSE_PER_OCTAVE = 4
VERDICT_PER_OCTAVE = 2
"""Few, wide bins: the noise of each of them enters the verdict."""


def evaluate_model(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    *,
    label: str,
    data_description: str,
    token_unit: str = "token",
    harm_range: tuple[int, int] | None = None,
    harm_threshold: float = HARM_THRESHOLD,
    tolerance: float = TOLERANCE,
    confidence: float = CONFIDENCE,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    command: str | None = None,
    seed: int = 0,
    stops: Sequence[int] = (),
    observer: Observer | None = None,
    cache: ResultCache | None = None,
    progress: bool = True,
) -> EvaluationResult:
    """Position-wise NLL, context harm, in-window NLL and the length verdict; three forward passes per token.

    The verdict judges positions inside the training length by their mean over all windows, which is many
    times more precise than the one beginning of each sequence, and later positions by the stream.

    Args:
        model: As for `stream_nll`.
        tokens: Token ids (S, L + 1): S held-out sequences, L > training_length positions each. Intervals need
            S >= 2, and a last octave of harm at 32 to 64 training lengths needs L = 64 * training_length.
        training_length: Tokens per training sequence, T.
        label: Name of the model in tables and figures.
        data_description: What the tokens are, for people.
        token_unit: What one token is, in the singular ("byte" for byte-level models).
        harm_range: Positions [start, stop) of the harm summary; by default the last octave [L/2, L).
        harm_threshold: Nats per token; context is called harmful in a bin whose lower bound lies above.
        tolerance: Of the verdict, as a fraction of perplexity.
        confidence: Two-sided, of all intervals.
        batch_size: Rows per forward pass; by default as many as memory limits allow.
        chunk_length: Tokens per row and forward pass; by default as many as memory limits allow.
        command: How the evaluation was started; by default this process' command line.
        seed: The seed the model and data came from; only recorded.
        stops: As for `stream_nll`.
        observer: As for `stream_nll`, and entered around the stream if it is a context manager; the stream is read
            for it even if the result is in the cache.
        cache: Where results are kept by their content, and what there is of one after an interrupt.
        progress: Show progress bars.

    Raises:
        ValueError: as `stream_nll` and `window_nll`, and for a harm range outside [T, L).
    """
    began = time.perf_counter()
    check_training_length(training_length)
    array = check_tokens(tokens, vocabulary_size(model), training_length + 1)
    length = array.shape[1] - 1
    start, stop = harm_range or last_octave(length, training_length)
    if not training_length <= start < stop <= length:
        raise ValueError(
            f"harm_range {(start, stop)} must lie within [{training_length}, {length}), between the training "
            "length and the evaluated length."
        )
    key: dict[str, Any] = {
        "result": "evaluation",
        "model": model_record(model),
        "tokens": token_digest(array),
        "training_length": training_length,
        "harm": [start, stop, harm_threshold],
        "verdict": [tolerance, confidence],
        "pieces": [batch_size, chunk_length],
    }
    recorded: dict[str, Any] = {
        "model": label,
        "data": DataRecord(data_description, key["tokens"], token_unit),
        "command": " ".join(sys.argv) if command is None else command,
        "seed": seed,
    }
    reading: Any = {"batch_size": batch_size, "chunk_length": chunk_length, "progress": progress}
    kept_stream, kept_windows = (
        None
        if cache is None
        else cache.partial({**key, "part": part, "stops": stops, "observed": observer is not None})
        for part in ("stream", "windows")
    )

    def stream() -> np.ndarray:
        # what an observer records while it is entered belongs to the stream, not to the windows
        with observer if isinstance(observer, AbstractContextManager) else nullcontext():
            return stream_nll(model, array, stops=stops, observer=observer, partial=kept_stream, **reading).nll

    if kept := cache.get_document(key, EvaluationResult) if cache is not None else None:
        if observer is not None:
            stream()
            if kept_stream is not None:
                kept_stream.remove()
        return dataclasses.replace(kept, **recorded)
    nll = stream()
    windows = window_nll(model, array, training_length, partial=kept_windows, **reading)

    def curves(values: np.ndarray, first: int) -> TwoResolutions:
        """Both resolutions of values (S, length - first) at the positions from `first` on."""
        return TwoResolutions(
            *(
                binned_curve(values, position_edges(length, training_length, *bins), first, confidence)
                for bins in ((EXACT_UNTIL, FINE_PER_OCTAVE), (0, COARSE_PER_OCTAVE))
            )
        )

    harm = nll[:, training_length:] - windows.truncated
    harm_curves = curves(harm, training_length)
    low = harm_curves.coarse.low or ()
    harmful = [edge for edge, bound in zip(harm_curves.coarse.edges, low, strict=False) if bound > harm_threshold]
    verdict_edges = position_edges(length, training_length, 0, VERDICT_PER_OCTAVE)
    inside = verdict_edges.index(training_length)
    verdict_nll = np.concatenate(
        [
            bin_means(windows.in_window, verdict_edges[: inside + 1]),
            bin_means(nll, verdict_edges[inside:]),
        ],
        axis=1,
    )
    early, late = context_use_bands(training_length)
    window_edges = position_edges(training_length, training_length, EXACT_UNTIL, FINE_PER_OCTAVE)
    result = EvaluationResult(
        **recorded,
        weights=key["model"]["weights"],
        training_length=training_length,
        evaluated_length=length,
        sequences=len(array),
        confidence=confidence,
        position_wise=curves(nll, 0),
        harm=ContextHarm(
            curves=harm_curves,
            last_range=(start, stop),
            last=estimate(harm[:, start - training_length : stop - training_length], confidence),
            threshold=harm_threshold,
            harmful_from=harmful[0] if harmful else None,
        ),
        in_window=InWindow(
            curve=binned_curve(windows.in_window, window_edges, 0, confidence),
            loss=estimate(windows.in_window, confidence),
            context_use=estimate(bin_means(windows.in_window, early) - bin_means(windows.in_window, late), confidence),
            early_band=early,
            late_band=late,
            windows_per_sequence=(length - training_length) // (training_length // 2) + 1,
        ),
        verdict=length_verdict(verdict_edges, verdict_nll, training_length, tolerance, confidence),
        device=str(next(model.parameters()).device),
        versions=installed_versions(),
        wall_seconds=time.perf_counter() - began,
    )
    if cache is not None:
        cache.put_document(key, result)
    for partial in (kept_stream, kept_windows):
        if partial is not None:
            partial.remove()
    return result


def estimate(values: np.ndarray, confidence: float) -> Estimate:
    """Mean of values (S, n) with the interval of the sequences' means."""
    mean, low, high = t_interval(values.mean(1, dtype=np.float64), confidence)
    return Estimate(float(mean), None if low is None else float(low), None if high is None else float(high))


def binned_curve(values: np.ndarray, edges: Sequence[int], first: int, confidence: float) -> Curve:
    """The curve of values (S, n), whose first column is position `first`, on the edges from `first` on."""
    kept = [edge for edge in edges if edge >= first]
    return make_curve(kept, bin_means(values, [edge - first for edge in kept]), confidence)
