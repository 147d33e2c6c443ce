"""The length up to which a model generalizes.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), Definition 3.2: with p* the lowest perplexity inside the training
length, reached at t*, a model generalizes to T if ppl(t) <= p* for all t in [t*, T] (the paper prints T_train there,
but T is meant). Here the definition is applied to logarithmic bins with a tolerance, to the means and to their bounds.
"""

import math
from collections.abc import Sequence

import numpy as np

from hf_recurrent_lengthgen.evaluation.results import Curve, LengthVerdict
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE, t_interval

TOLERANCE = 0.01
"""Perplexity may exceed p* by this fraction."""


def make_curve(edges: Sequence[int], values: np.ndarray, confidence: float = CONFIDENCE) -> Curve:
    """The curve of per-sequence bin values (S, n) on n + 1 edges."""
    mean, low, high = t_interval(values, confidence)
    bounds = (None if bound is None else tuple(bound.tolist()) for bound in (low, high))
    return Curve(tuple(edges), tuple(mean.tolist()), *bounds)


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
        confidence: Two-sided confidence of the paired intervals.
    """
    if training_length not in edges[1:]:
        raise ValueError(f"The training length {training_length} must be one of the bin edges {tuple(edges)}.")
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}.")
    best = int(nll[:, : list(edges).index(training_length)].mean(0).argmin())
    excess = make_curve(edges, nll - nll[:, best : best + 1], confidence)
    allowed = math.log1p(tolerance)
    later = range(best + 1, len(edges) - 1)
    proven = [] if excess.low is None else [edges[i] for i in later if excess.low[i] > allowed]
    return LengthVerdict(
        best_bin=(edges[best], edges[best + 1]),
        best_nll=float(nll[:, best].mean()),
        excess=excess,
        tolerance=tolerance,
        holds_to=next((edges[i] for i in later if excess.mean[i] > allowed), edges[-1]),
        violated_from=proven[0] if proven else None,
    )
