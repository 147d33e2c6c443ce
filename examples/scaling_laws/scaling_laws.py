"""How long to train, and how far a model recalls: length thresholds, and their scaling laws in the state size.

Chen et al., 2024 (arXiv:2410.07145), sections 4.2, 4.3 and 5. A law belongs to a family of models. Each state size N_S
has one T_forget, the shortest training length from which on models do not fail on longer texts, and one T_recall, the
longest length of accurate recall over its training lengths. The paper finds T_forget = 5.172 N_S - 4.469 and
T_recall = 4.756 (1.365^N_S - 1) - 0.742 for Mamba-2 (N_S in millions of state elements, T in thousands of tokens).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE
from hf_recurrent_lengthgen.metrics.repeated_token import FAILURE_FACTOR
from hf_recurrent_lengthgen.metrics.retrieval.result import RECALL_ACCURACY

STEEPEST = 30.0
"""The exponential is searched up to c^(range of sizes) = e^30 and e^-30."""
LARGEST_EXPONENT = 300.0
"""Largest exponent of c and c^N, so that their squares are finite."""
MILLION, THOUSAND = 1_000_000, 1_000  # the paper's units of state sizes and lengths
Form = Literal["linear", "exponential"]
Relation = Literal["=", "<=", "<", ">=", ">"]


@dataclass(frozen=True)
class Threshold:
    """T_forget or T_recall of one state size N_S (elements), or a bound on it.

    The threshold is in `relation` to `length` (tokens). Relations other than "=" are bounds, for which the lengths
    tried did not suffice. `tried` holds the training lengths behind the threshold, ascending.
    """

    size: int
    relation: Relation
    length: int
    tried: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.size < 1 or self.length < 1:
            raise ValueError(
                f"A threshold needs a size and a length of at least 1, got {self.size} and {self.length}."
            )
        if not self.tried or list(self.tried) != sorted(set(self.tried)):
            raise ValueError(f"A threshold needs different training lengths in ascending order, got {self.tried}.")


@dataclass(frozen=True)
class LawLine:
    """The law at some state sizes, in tokens, with pointwise bounds, which are None without degrees of freedom."""

    sizes: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None


@dataclass(frozen=True)
class LawFit:
    """A law fitted by least squares, "linear": T = a N + b, or "exponential": T = a (c^N - 1) + b.

    Attributes:
        size_unit, length_unit: Elements and tokens in the units of N and T.
        coefficients: a, b or a, c, b with intervals, whose bounds are None without degrees of freedom.
        r_squared: 1 - (sum of squared residuals) / (sum of squared deviations from the mean).
        points: Number of fitted points.
        confidence: Two-sided confidence of all intervals.
        line: The law from the smallest to the largest size.
    """

    form: Form
    size_unit: int
    length_unit: int
    coefficients: dict[str, Estimate]
    r_squared: float
    points: int
    confidence: float
    line: LawLine


def state_size(model: Any) -> int:
    """Number of elements in the recurrent state of one text: recurrent parts and convolution columns of all layers.

    With K - 1 columns for K taps, this is the "state size" of Chen et al., 2024, Table 2. The tokens that a window of
    forgetting keeps do not count.

    Raises:
        ValueError: for a model without `state_shapes()`, which models of this package and of `stateful` have.
    """
    if not hasattr(model, "state_shapes"):
        raise ValueError(
            f"{type(model).__name__} has no state_shapes(), so its state cannot be counted: load it with "
            "hf_recurrent_lengthgen.load_model(...), or wrap it with stateful(model)."
        )
    return sum(math.prod(shape.recurrent) + math.prod(shape.conv) for shape in model.state_shapes())


def fails(curve: Curve, training_length: int, factor: float = FAILURE_FACTOR, skip: float | None = None) -> bool:
    """Whether the loss beyond the training length ever exceeds `factor` times the largest one inside it (4.2).

    That is, `loss_ratio` above `factor`, which must be above 1. The paper averages 128 texts of 1M tokens.
    """
    if not factor > 1:
        raise ValueError(f"factor must be above 1, got {factor}.")
    return loss_ratio(curve, training_length, skip) > factor


def loss_ratio(curve: Curve, training_length: int, skip: float | None = None) -> float:
    """The largest loss beyond the training length divided by the largest one inside it.

    The first tokens have no context, so their loss must not set the limit: the first bin is left out.

    Args:
        curve: Loss by position, from position 0 to well beyond the training length, averaged over texts.
        training_length: T, one of the edges; see `position_edges`.
        skip: Leave out the bins that start within this share of the training length; None for the first bin only,
            which then must be wide enough.

    Raises:
        ValueError: for a training length that is not an edge, no bin left inside or beyond it, losses that are NaN or
            negative, and an impossible share.
    """
    if skip is not None and not 0 <= skip < 1:
        raise ValueError(f"skip must be None or a share of the training length, at least 0 and below 1; got {skip}.")
    if training_length not in curve.edges or curve.edges[0] != 0:
        raise ValueError(
            f"The curve must begin at 0 and have an edge at the training length {training_length}, but its edges are "
            f"{_some(curve.edges)}. Take the edges from position_edges(length, training_length)."
        )
    if any(math.isnan(loss) or loss < 0 for loss in curve.mean):
        raise ValueError(f"Losses must be at least 0 and not NaN, got {_some(curve.mean)}.")
    first = curve.edges[1] if skip is None else skip * training_length
    bins = list(zip(pairwise(curve.edges), curve.mean, strict=True))
    inside = [loss for (start, stop), loss in bins if first <= start and stop <= training_length]
    beyond = [loss for (start, _), loss in bins if start >= training_length]
    if not inside or not beyond:
        raise ValueError(
            f"The edges {_some(curve.edges)} leave no bin {'beyond' if inside else 'to set the limit inside'} the "
            f"training length {training_length}: give narrower bins, longer texts, or a smaller skip."
        )
    if max(inside) == 0:
        return math.inf if max(beyond) > 0 else 1.0
    return max(beyond) / max(inside)


def forget_threshold(
    size: int, curves: Mapping[int, Curve], factor: float = FAILURE_FACTOR, skip: float | None = None
) -> Threshold:
    """T_forget of a state size: the shortest training length from which on models do not fail.

    A length that does not fail but is shorter than one that fails does not count. If none fails, T_forget is at most
    the shortest length ("<="). If the longest fails, T_forget is above it (">").

    Args:
        size: N_S, `state_size(model)`.
        curves: Training length -> loss by position of the model trained with it.
        factor, skip: As in `fails`.

    Raises:
        ValueError: for no curves, and as in `fails`.
    """
    if not curves:
        raise ValueError("T_forget needs the curve of at least one training length, got none.")
    tried = sorted(curves)
    failed = [length for length in tried if fails(curves[length], length, factor, skip)]
    if not failed:
        return Threshold(size, "<=", tried[0], tuple(tried))
    longer = [length for length in tried if length > failed[-1]]
    return Threshold(size, "=" if longer else ">", longer[0] if longer else failed[-1], tuple(tried))


def recall_threshold(
    size: int, accuracies: Mapping[int, Mapping[int, float]], least: float = RECALL_ACCURACY
) -> Threshold:
    """T_recall of a state size: the length up to which recall is accurate, the maximum over training lengths (4.3).

    If no model recalls at its shortest length, T_recall is below that length ("<"). If a model recalls up to its
    longest length, T_recall is at least the length found (">=").

    Args:
        size: N_S, `state_size(model)`.
        accuracies: Training length -> length of the prompt -> share of right answers, as `RetrievalResult.by_length`.
        least: Lowest accuracy that counts as accurate recall.

    Raises:
        ValueError: for no training length, a training length without prompt lengths, shares outside [0, 1], and a
            `least` outside (0, 1].
    """
    if not 0 < least <= 1:
        raise ValueError(f"least must be above 0 and at most 1, got {least}.")
    if not accuracies or not all(accuracies.values()):
        raise ValueError("T_recall needs at least one training length, and at least one measured length for each.")
    shares = [share for by_length in accuracies.values() for share in by_length.values()]
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"Accuracies must be from 0 to 1, got {_some(shares)}.")
    longest = {trained: _recalled(by_length, least) for trained, by_length in accuracies.items()}
    length, tried = max(longest.values()), tuple(sorted(accuracies))
    if length == 0:
        return Threshold(size, "<", min(min(by_length) for by_length in accuracies.values()), tried)
    open_ended = any(longest[trained] == max(by_length) for trained, by_length in accuracies.items())
    return Threshold(size, ">=" if open_ended else "=", length, tried)


def _recalled(accuracy: Mapping[int, float], least: float) -> int:
    return max(takewhile(lambda length: accuracy[length] >= least, sorted(accuracy)), default=0)


class NoFitError(ValueError):
    """The points do not determine the law."""


def fit_linear_law(
    sizes: Sequence[float],
    lengths: Sequence[float],
    confidence: float = CONFIDENCE,
    size_unit: int = MILLION,
    length_unit: int = THOUSAND,
) -> LawFit:
    """T = a N + b by least squares, with t-intervals of n - 2 degrees of freedom.

    Args:
        sizes, size_unit: State elements, and the number of elements in a unit of N.
        lengths, length_unit: Tokens, and the number of tokens in a unit of T.
        confidence: Two-sided.

    Raises:
        NoFitError: a `ValueError`, for fewer than two different sizes, or lengths that are all equal.
        ValueError: for points that are not finite, and an impossible confidence or unit.
    """
    points = _points(sizes, lengths, 2, confidence, size_unit, length_unit)
    (a, b), *_ = np.linalg.lstsq(np.stack([points.n, np.ones_like(points.n)], 1), points.t, rcond=None)
    return _law_fit("linear", {"a": a, "b": b}, points)


def fit_exponential_law(
    sizes: Sequence[float],
    lengths: Sequence[float],
    confidence: float = CONFIDENCE,
    size_unit: int = MILLION,
    length_unit: int = THOUSAND,
) -> LawFit:
    """T = a (c^N - 1) + b by least squares, with linearized t-intervals of n - 3 degrees of freedom.

    For a given c the law is linear in a and b, so only c is searched: log c on a grid, then to full precision. Points
    that are nearly on a line do not determine a and c; the intervals show that, as far as the linearization holds. All
    points have equal weight, so the largest lengths dominate. The intervals hold if thresholds are equally uncertain
    at all sizes, and are far too narrow if the uncertainty grows with the length. Below c = 1 the law saturates.

    Args:
        sizes, lengths, confidence, length_unit: As in `fit_linear_law`.
        size_unit: As in `fit_linear_law`; choose about the range of sizes, because c is per unit.

    Raises:
        NoFitError: a `ValueError`, for fewer than three different sizes, lengths that are all equal, and points for
            which no c is best: on a straight line, or with a step that a steeper law always fits better.
        ValueError: for points that are not finite, an impossible confidence or unit, and a size unit in which c is
            too large for a number.
    """
    points = _points(sizes, lengths, 3, confidence, size_unit, length_unit)
    n, t = points.n, points.t
    span = np.ptp(n)
    share = (n - n.min()) / span  # (n,), from 0 to 1

    def solution(growth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slope and start (G,) of the best fit T = slope grown + start for each growth (G,), and residuals (G, n)."""
        grown = _grown(growth[:, None], share)
        centered = grown - grown.mean(1, keepdims=True)
        slope = centered @ t / np.square(centered).sum(1)
        start = t.mean() - slope * grown.mean(1)
        return slope, start, slope[:, None] * grown + start[:, None] - t

    grid = np.linspace(-STEEPEST, STEEPEST, 1201)
    best = int(np.square(solution(grid)[2]).sum(1).argmin())
    if best in (0, len(grid) - 1):
        raise NoFitError("The points have a step, or scatter: the steeper an exponential law, the better it fits.")
    bounds, tolerances = (grid[best - 1], grid[best + 1]), {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    growth = float(least_squares(lambda x: solution(x)[2][0], [grid[best]], bounds=bounds, **tolerances).x[0])
    if abs(growth) < 1e-6:
        raise NoFitError("The points are on a straight line, which does not determine a and c of an exponential law.")
    slope, start = (float(part[0]) for part in solution(np.array([growth]))[:2])
    if abs(growth) / span * max(1.0, n.max()) > LARGEST_EXPONENT:
        raise ValueError(
            f"c^N overflows with N in units of {size_unit:,} elements and sizes from {min(sizes):,} to "
            f"{max(sizes):,}: give a size_unit of about their range, {max(sizes) - min(sizes):,}."
        )
    a = slope / growth * math.exp(-growth / span * n.min())
    coefficients = {"a": a, "c": math.exp(growth / span), "b": start - slope / growth + a}
    return _law_fit("exponential", coefficients, points)


def _grown(growth: np.ndarray, share: np.ndarray) -> np.ndarray:
    """(e^(growth share) - 1) / growth, which is `share` at growth 0; shapes as they broadcast."""
    growth = np.where(growth == 0, 1e-100, growth)
    grown: np.ndarray = np.expm1(growth * share) / growth
    return grown


class _Points(NamedTuple):
    """Sizes N and lengths T in their units, (n,) float64 each, and the settings of the fit."""

    n: np.ndarray
    t: np.ndarray
    confidence: float
    size_unit: int
    length_unit: int


def _points(
    sizes: Sequence[float], lengths: Sequence[float], least: int, confidence: float, size_unit: int, length_unit: int
) -> _Points:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}.")
    if size_unit < 1 or length_unit < 1:
        raise ValueError(f"size_unit and length_unit must be at least 1, got {size_unit} and {length_unit}.")
    n, t = np.asarray(sizes, np.float64) / size_unit, np.asarray(lengths, np.float64) / length_unit
    if n.ndim != 1 or n.shape != t.shape or not (np.isfinite(n).all() and np.isfinite(t).all()):
        raise ValueError(f"A law needs one finite size and length per point, got {list(sizes)}, {list(lengths)}.")
    different = len(np.unique(n))
    if different < least:
        raise NoFitError(
            f"A law with {least} coefficients needs exact thresholds of at least {least} different state sizes, got "
            f"{different}."
        )
    if np.ptp(t) == 0:
        raise NoFitError(f"All thresholds are {lengths[0]:g} tokens, so there is nothing to fit.")
    return _Points(n, t, confidence, size_unit, length_unit)


def _law_fit(form: Form, coefficients: dict[str, float], points: _Points) -> LawFit:
    """The fit with R^2, intervals from the covariance s^2 (J'J)^-1, and the line with its band."""
    n, t, confidence, size_unit, length_unit = points
    values = [float(value) for value in coefficients.values()]
    grid = np.linspace(n.min(), n.max(), 101)
    residuals, mean = law_value(form, values, n) - t, law_value(form, values, grid)
    low, high = None, None
    intervals: list[Any] = [(None, None)] * len(values)
    freedom = len(n) - len(values)
    if freedom > 0:
        scale = student.ppf((1 + confidence) / 2, freedom) * math.sqrt(residuals @ residuals / freedom)
        jacobian = _jacobian(form, values, n)
        norms = np.linalg.norm(jacobian, axis=0)
        inverse = np.linalg.pinv(jacobian / norms, rcond=1e-14) / norms[:, None]  # (k, n); (J'J)^-1 = inverse inverse'
        half = (scale * np.linalg.norm(inverse, axis=1)).tolist()
        intervals = [(value - apart, value + apart) for value, apart in zip(values, half, strict=True)]
        band = scale * np.linalg.norm(_jacobian(form, values, grid) @ inverse, axis=1)
        low, high = (tuple((length_unit * bound).tolist()) for bound in (mean - band, mean + band))
    estimates = [Estimate(value, *interval) for value, interval in zip(values, intervals, strict=True)]
    deviations = t - t.mean()
    return LawFit(
        form=form,
        size_unit=size_unit,
        length_unit=length_unit,
        coefficients=dict(zip(coefficients, estimates, strict=True)),
        r_squared=1 - float(residuals @ residuals) / float(deviations @ deviations),
        points=len(n),
        confidence=confidence,
        line=LawLine(tuple((size_unit * grid).tolist()), tuple((length_unit * mean).tolist()), low, high),
    )


def law_value(form: Form, coefficients: Sequence[float], sizes: np.ndarray) -> np.ndarray:
    """T of a law with coefficients (a, b) or (a, c, b) at sizes N of any shape, both in the units of the law."""
    if form == "linear":
        a, b = coefficients
        return np.asarray(a * sizes + b)
    a, c, b = coefficients
    return np.asarray(a * np.expm1(math.log(c) * sizes) + b)


def _jacobian(form: Form, coefficients: Sequence[float], sizes: np.ndarray) -> np.ndarray:
    """Derivatives of `law_value` with respect to its coefficients, (n, k)."""
    ones = np.ones_like(sizes)
    if form == "linear":
        return np.stack([sizes, ones], 1)
    a, c, _ = coefficients
    return np.stack([np.expm1(math.log(c) * sizes), a * sizes * c ** (sizes - 1), ones], 1)


def _some(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values[:8]) + (", ..." if len(values) > 8 else "")
