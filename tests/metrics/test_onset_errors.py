"""How often the first bin of harm, or of failure, is named where there is none, and how much later a real one is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen.evaluation.statistics import position_edges, shown_above, t_interval
from hf_recurrent_lengthgen.metrics.context_harm.measure import length_verdict

BINS, RUNS, ONSET = 24, 400, 8
EDGES = position_edges(8192, 128, 0, 2)  # of the verdict
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "heavy tails": lambda random, shape: random.standard_t(3, shape) / np.sqrt(3),
    "a few texts with much": lambda random, shape: random.exponential(1, shape) - 1,
}


def differences(draw: str, texts: int, bins: int = BINS, correlation: float = 0.6) -> np.ndarray:
    """(RUNS, texts, bins) of mean 0 and variance 1, neighboring bins correlated."""
    new = DRAWS[draw](np.random.default_rng(texts), (RUNS, texts, bins))
    values = new.copy()
    for index in range(1, bins):
        values[..., index] = correlation * values[..., index - 1] + np.sqrt(1 - correlation**2) * new[..., index]
    return values


def onset(values: np.ndarray, together: bool = True) -> int:
    """First bin shown to be above zero; `BINS` for none. Not `together`: by the own interval of each bin."""
    interval: Any = t_interval(values)
    own = interval.low > 0
    shown = shown_above(interval.mean.tolist(), interval.low.tolist(), 0, len(values)) if together else own
    return int(shown.argmax()) if shown.any() else BINS


@pytest.mark.parametrize("texts", [4, 8, 32, 64])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_harm_is_named_where_there_is_none_in_less_than_one_of_twenty(
    draw: str, texts: int, correlation: float
) -> None:
    """By the own intervals of bins it is in up to 46 of 100."""
    found = [onset(values) < BINS for values in differences(draw, texts, correlation=correlation)]
    assert np.mean(found) < 0.05


@pytest.mark.parametrize(("texts", "effect", "later"), [(4, 4, 3), (8, 2, 3), (16, 1, 3), (32, 1, 2), (64, 0.5, 3)])
def test_real_harm_is_named_a_little_later_and_hardly_ever_too_early(texts: int, effect: float, later: int) -> None:
    """Harm rises from bin ONSET on, by `effect` standard deviations in 8 bins, that is, two doublings."""
    rise = effect * np.clip(np.arange(BINS) - ONSET + 1, 0, None) / 8
    values = differences("heavy tails", texts) + rise
    alone, found = np.array([[onset(one, together) for together in (False, True)] for one in values]).T
    assert (alone < ONSET).mean() > 0.08
    assert (found < ONSET).mean() < 0.05
    assert (found < BINS).mean() > 0.95
    assert np.median(found) - np.median(alone) <= later


@pytest.mark.parametrize("texts", [4, 32])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("flat", [4, 14])
def test_failure_is_named_where_there_is_none_in_less_than_one_of_twenty(draw: str, texts: int, flat: int) -> None:
    """Every later bin is as far above the best as the tolerance allows, and several bins inside are equally good, so
    that the best one is chosen by chance."""
    border = EDGES.index(128)
    level = np.full(len(EDGES) - 1, np.log1p(0.01))
    level[:border] = [*np.linspace(2, 0.2, border - flat), *[0.0] * flat]
    values = 0.3 * differences(draw, texts, len(level), 0.3) + level
    found = [length_verdict(EDGES, nll, 128).violated_from is not None for nll in values]
    assert np.mean(found) < 0.05
