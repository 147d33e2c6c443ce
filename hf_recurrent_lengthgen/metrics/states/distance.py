"""How far the states at a position are from those inside the training length, head by head.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 3.5 and appendix C, show that models fail where the states of
some heads leave the distribution seen in training. Here that is one number per head and position:

    distance(n) = W2(D_n, D_ref) / std(D_ref)

D_n is the distribution of the elements of the head's state after n tokens, over sequences, head dim and state dim.
D_ref pools the sampled positions in (T/2, T] (T: training length). W2 is the 2-Wasserstein distance; between normal
distributions it is the root of (difference of means)^2 + (difference of stds)^2. The distance is 1 if all elements
move by one standard deviation of training, or if the standard deviation doubles.

The null level of a head compares one half of the sequences at one reference position with the other half pooled over
all reference positions. It is the largest such distance over positions and several random halves. It is too small for
a head that changes more slowly than over T/2 tokens. So a head drifts if its mean distance over the last doubling of
the position is

- above its null level;
- above 1, which is the distance of a head whose state had become a constant, its mean in training;
- not due to a few texts: the distances of single sequences from D_ref rise from the reference positions to the last
  doubling, with the lower bound of their paired t-interval over sequences. The confidence is shared by all intervals
  of the model (Bonferroni).

Fewer than FEWEST_SEQUENCES sequences cannot decide the last condition, so no head drifts then. A text
that is not random, such as one repeated token, needs no halves and no intervals: its null level is the largest
distance of a training position from D_ref, and the last condition does not apply. In models of
12 stationary heads that forget within 6 T tokens, less than 1 in 100 heads is taken for drifting with 4 to 16 texts.

Standard deviations count as at least SMALLEST_STD of the magnitude of a head's elements in training, so that rounding
is not a drift. Permuting elements inside a head does not change the distance. Models trained with carried states have
seen more than (T/2, T]; for them the distance is an upper bound of what is new. `patching.py` measures whether
drifting heads cause excess loss.
"""

import functools
from typing import NamedTuple

import numpy as np

from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE, t_interval
from hf_recurrent_lengthgen.metrics.states.result import FEWEST_SEQUENCES
from hf_recurrent_lengthgen.metrics.states.trajectory import LayerTrajectory, StateTrajectory

SMALLEST_DRIFT = 1.0
"""Least distance that counts as a drift: that of a head whose state had become a constant, its mean."""
SMALLEST_STD = 1e-5
"""Least standard deviation, relative to the root mean square of a head's elements: about 100 roundings of float32."""
HALVES = 8
"""Number of random halves of the sequences for the null level."""
LEVELS = 64
"""Number of quantile intervals on which two distributions are compared; half of them in the outer 8 % at each end."""


class Drift(NamedTuple):
    """Distances of the units of a layer.

    Attributes:
        distance: (n, U), in standard deviations of the reference.
        null: (U,): the largest distance among training positions.
        late: (U,): mean distance over the last doubling of the position.
        drifts: (U,): whether the unit drifts.
        leaves_at: For each drifting unit, the first position beyond the training length from which on the distance
            stays above `null` and the smallest drift; None if there is none.
    """

    distance: np.ndarray
    null: np.ndarray
    late: np.ndarray
    drifts: np.ndarray
    leaves_at: tuple[int | None, ...]


def reference_positions(positions: tuple[int, ...], training_length: int) -> list[int]:
    """Indices of the positions in (T/2, T]; a `ValueError` if there are none, or none beyond T."""
    inside = [index for index, position in enumerate(positions) if training_length / 2 < position <= training_length]
    if not inside or positions[-1] <= training_length:
        raise ValueError(
            f"positions must have some in ({training_length / 2:g}, {training_length}], to compare with, and some "
            f"beyond, got {positions[:3]} to {positions[-1]}; see sample_positions."
        )
    return inside


def state_drift(
    trajectory: StateTrajectory,
    training_length: int,
    smallest: float = SMALLEST_DRIFT,
    confidence: float = CONFIDENCE,
    *,
    fixed: bool = False,
) -> tuple[Drift | None, ...]:
    """Distances of all layers; None for a layer without a recurrent part.

    Args:
        trajectory: From a `StateObserver`.
        training_length: T.
        smallest: Distance above which a head can drift.
        confidence: Two-sided confidence of the intervals over sequences, of all heads together.
        fixed: Whether the text is not random, so that one is enough.

    Raises:
        ValueError: as in `reference_positions`, and for fewer than two sequences of a random text.
    """
    inside = reference_positions(trajectory.positions, training_length)
    heads = sum(layer.recurrent.mean.shape[2] for layer in trajectory.layers if layer.recurrent is not None)
    of_one = 1 - (1 - confidence) / max(1, heads)
    return tuple(
        None
        if layer.recurrent is None
        else _drift(layer, trajectory.positions, inside, training_length, smallest, None if fixed else of_one)
        for layer in trajectory.layers
    )


def _drift(
    layer: LayerTrajectory,
    positions: tuple[int, ...],
    inside: list[int],
    training_length: int,
    smallest: float,
    confidence: float | None,
) -> Drift:
    """Without a confidence, of a text that is not random."""
    assert layer.recurrent is not None
    assert layer.sketch is not None
    mean, variance = (values.astype(np.float64) for values in layer.recurrent[:2])
    sequences = mean.shape[1]
    if sequences < 2 and confidence is not None:
        raise ValueError(
            f"State distances need at least two sequences, to tell a drift from a different text, got {sequences}."
        )
    scale = pooled_std(mean[inside].reshape(1, -1, mean.shape[2]), variance[inside].reshape(1, -1, mean.shape[2]))[0]
    magnitude = np.sqrt((mean[inside] ** 2 + variance[inside]).mean((0, 1)))
    floor = np.maximum(SMALLEST_STD * magnitude, np.finfo(np.float32).tiny)  # (U,)
    scale = np.maximum(scale, floor)
    sketch = layer.sketch.astype(np.float64)

    def pooled(places: list[int], rows: np.ndarray) -> np.ndarray:
        return pooled_levels(np.moveaxis(sketch[places][:, rows], 2, 0), layer.masses)

    everyone = np.arange(sequences)
    reference = pooled(inside, everyone)
    distance = np.stack([_wasserstein(pooled([n], everyone), reference) for n in range(len(positions))]) / scale
    late = [n for n, position in enumerate(positions) if position > max(training_length, positions[-1] / 2)]
    if confidence is None:
        null, shown = distance[inside].max(0), np.ones(len(scale), dtype=bool)
    else:
        random = np.random.default_rng(0)
        null = np.zeros(len(scale))
        for _ in range(HALVES):
            order = random.permutation(sequences)
            one, other = order[: sequences // 2], order[sequences // 2 :]
            rest = pooled(inside, other)
            null = np.maximum(null, np.max([_wasserstein(pooled([n], one), rest) for n in inside], 0) / scale)
        coarse = pooled_levels(np.moveaxis(sketch[inside], 2, 0), layer.masses, np.cumsum([0.0, *layer.masses]))
        single = np.sqrt((sketch - coarse) ** 2 @ layer.masses) / scale  # of each sequence, (n, S, U)
        rise = t_interval(single[late].mean(0) - single[inside].mean(0), confidence).low
        assert rise is not None  # there are two sequences
        shown = (rise > 0) & (sequences >= FEWEST_SEQUENCES)
    threshold = np.maximum(null, smallest)
    last = distance[late].mean(0)
    drifts = (last > threshold) & shown
    leaves = (_leaves(distance[:, unit], threshold[unit], positions, training_length) for unit in range(len(scale)))
    leaves_at = tuple(place if drifting else None for place, drifting in zip(leaves, drifts, strict=True))
    return Drift(distance, null, last, drifts, leaves_at)


def _leaves(distance: np.ndarray, threshold: float, positions: tuple[int, ...], training_length: int) -> int | None:
    first = None
    for place in reversed(range(len(positions))):
        if positions[place] <= training_length or distance[place] <= threshold:
            break
        first = positions[place]
    return first


def pooled_std(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Standard deviation over sequences and elements, from mean and variance of each sequence, (n, S, ...)."""
    return np.asarray(np.sqrt(variance.mean(1) + mean.var(1)))


def pooled_levels(atoms: np.ndarray, masses: np.ndarray, edges: np.ndarray | None = None) -> np.ndarray:
    """Means of the quantile function between levels, (U, intervals), of distributions pooled from parts of one weight.

    `atoms` (U, ..., G) are the values of each part, `masses` (G,) their shares, `edges` the levels from 0 to 1. By
    default there are LEVELS intervals, narrower at the ends.
    """
    edges = _edges() if edges is None else edges
    weights = np.broadcast_to(masses, atoms.shape[1:]).reshape(-1)
    values = atoms.reshape(len(atoms), -1)
    order = values.argsort(1)
    shares = weights[order] / weights.sum()
    sums = np.pad((shares * np.take_along_axis(values, order, 1)).cumsum(1), ((0, 0), (1, 0)))
    shares = np.pad(shares.cumsum(1), ((0, 0), (1, 0)))
    totals = np.empty((len(values), len(edges)))
    for unit in range(len(values)):
        totals[unit] = np.interp(edges, shares[unit], sums[unit])
    return np.diff(totals) / np.diff(edges)


@functools.cache
def _edges() -> np.ndarray:
    """Edges from 0 to 1 of LEVELS intervals: geometric at the ends, from 1/1024 to 1/12, and even between them."""
    tail = np.geomspace(1 / 1024, 1 / 12, LEVELS // 4)
    return np.concatenate(
        [[0.0], tail, np.linspace(tail[-1], 1 - tail[-1], LEVELS // 2 + 1)[1:-1], 1 - tail[::-1], [1.0]]
    )


def _wasserstein(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """W2 of distributions from `pooled_levels`, (U,)."""
    return np.asarray(np.sqrt(((one - other) ** 2 * np.diff(_edges())).sum(1)))
