"""Position bins and confidence intervals over sequences.

The unit of sampling is always a sequence: a value is first averaged inside each sequence, and the interval is the
t-interval of these averages. Tokens of one sequence are not independent, so they never count as samples.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # `stats` takes long to import

from hf_recurrent_lengthgen.evaluation.results import LARGEST_NLL, Curve, Estimate
from hf_recurrent_lengthgen.evaluation.settings import CONFIDENCE

SHORTEST_TRAINING_LENGTH = 4
"""Shorter training lengths leave no room for the two bands of `context_use`."""


class Interval(NamedTuple):
    """Means over sequences and their two-sided t-intervals, (...) each; no bounds for fewer than 2 sequences."""

    mean: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


def t_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Mean over the first axis of values (S, ...), one per sequence, and its t-interval.

    The interval is mean +- t_{(1 + confidence)/2, S - 1} * s / sqrt(S).
    """
    count = len(values)
    mean = values.mean(0, dtype=np.float64)
    if count < 2:
        return Interval(mean, None, None)
    error = values.std(0, ddof=1, dtype=np.float64) / math.sqrt(count)
    half = special.stdtrit(count - 1, (1 + confidence) / 2) * error
    return Interval(mean, mean - half, mean + half)


def shown_above(
    mean: Sequence[float],
    low: Sequence[float] | None,
    threshold: float,
    count: int,
    confidence: float = CONFIDENCE,
    choices: int = 1,
) -> np.ndarray:
    """Which of several means are shown to be above a threshold, (n,): with the confidence that none is by mistake.

    The confidence is shared by all of them, step by step (Holm, 1979): the bounds of the means that are not shown yet
    are widened to as many as these are, until no further mean is shown. Holds for any dependence between the means.

    Args:
        mean, low: Means and the lower bounds of their t-intervals; no bounds (None) show nothing.
        count: Sequences that the means are over.
        confidence: Two-sided confidence of each interval, and of all decisions together.
        choices: Number of references from which that of the means was chosen, each of which must be allowed for.
    """
    shown, more = np.zeros(len(mean), dtype=bool), True
    while more and low is not None:
        share = (1 - confidence) / 2 / choices / max(1, int((~shown).sum()))
        wider = special.stdtrit(count - 1, 1 - share) / special.stdtrit(count - 1, (1 + confidence) / 2)
        above = mean - np.subtract(mean, low) * wider > threshold
        more = bool((above & ~shown).any())
        shown |= above
    return shown


def position_edges(
    length: int, training_length: int, exact_until: int = 0, bins_per_doubling: int = 16
) -> tuple[int, ...]:
    """Edges of disjoint bins over the positions [0, length): of width 1 below `exact_until`, then logarithmic.

    Bin i holds the positions edges[i] <= t < edges[i + 1]. The logarithmic edges are
    round(training_length * 2^(k / bins_per_doubling)), without duplicates, so the training length is always an edge.
    If `length` cuts the last bin to less than half of its width, the bin is merged with the previous one, unless it
    starts at the training length.
    """
    lowest = -math.ceil(bins_per_doubling * math.log2(training_length)) - bins_per_doubling
    highest = math.ceil(bins_per_doubling * max(0.0, math.log2(length / training_length))) + 1
    grid = {round(training_length * 2 ** (k / bins_per_doubling)) for k in range(lowest, highest + 1)}
    logarithmic = {edge for edge in grid if exact_until <= edge < length}
    edges = sorted({0, *range(min(exact_until, length)), *logarithmic, length})
    last = edges[-2]
    full_width = min(edge for edge in grid if edge > last) - last
    if last in logarithmic and last not in (0, training_length) and length - last < full_width / 2:
        del edges[-2]
    return tuple(edges)


def bin_means(values: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Mean of each row over each bin: values (S, T), edges (n + 1,) inside [0, T] -> (S, n) float64."""
    widths = np.diff(np.asarray(edges))
    if len(edges) < 2 or (widths <= 0).any() or edges[0] < 0 or edges[-1] > values.shape[1]:
        raise ValueError(
            f"edges must increase strictly inside [0, {values.shape[1]}], got {edges[0]} to {edges[-1]} "
            f"({len(edges)} edges)."
        )
    sums = np.add.reduceat(values[:, : edges[-1]], np.asarray(edges[:-1]), axis=1, dtype=np.float64)
    return sums / widths


def make_curve(edges: Sequence[int], values: np.ndarray, confidence: float = CONFIDENCE) -> Curve:
    """Means over sequences, with intervals, of bin values (S, n) on n + 1 edges."""
    mean, low, high = t_interval(values, confidence)
    bounds = (None if bound is None else tuple(bound.tolist()) for bound in (low, high))
    return Curve(tuple(edges), tuple(mean.tolist()), *bounds)


def estimate(values: np.ndarray, confidence: float) -> Estimate:
    """Mean of values (S, n) with the interval of the sequences' means."""
    mean, low, high = t_interval(values.mean(1, dtype=np.float64), confidence)
    return Estimate(float(mean), None if low is None else float(low), None if high is None else float(high))


def binned_curve(values: np.ndarray, edges: Sequence[int], first: int, confidence: float) -> Curve:
    """`make_curve` of values (S, n), whose first column is position `first`, on the edges from `first`."""
    later = [edge for edge in edges if edge >= first]
    return make_curve(later, bin_means(values, [edge - first for edge in later]), confidence)


def perplexity(nll: ArrayLike) -> np.ndarray:
    """exp(min(NLL, `LARGEST_NLL`)) of nats per token, float64."""
    return np.exp(np.minimum(nll, LARGEST_NLL), dtype=np.float64)


def check_training_length(training_length: int) -> None:
    if training_length < SHORTEST_TRAINING_LENGTH:
        raise ValueError(f"training_length must be at least {SHORTEST_TRAINING_LENGTH}, got {training_length}.")


def last_doubling(length: int, training_length: int) -> tuple[int, int]:
    """The positions [L/2, L) without those inside the training length: the range of a summary."""
    return max(length // 2, training_length), length
