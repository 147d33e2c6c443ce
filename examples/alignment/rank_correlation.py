"""Rank correlation of a metric with long-context scores over a set of models.

    .venv/bin/python examples/alignment/rank_correlation.py diagnosis/result.json   # of three or more models

Du et al., 2025 (arXiv:2506.11769), Table 1, correlate long-short misalignment and training loss with scores at long
contexts over 7 models. The coefficients are Spearman's (computed from the table's columns: 0.67, 0.88 and -0.95 as
printed, and -0.56 where -0.59 is printed).

The command correlates the misalignment with the loss in the last doubling of the position, from a result of
`lengthgen diagnose`.

The p-value is the share of pairings of the two columns with at least as strong a correlation. With n models it is at
least 2 / n!, so 4 models (0.083) never suffice for 5 %.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.stats import permutation_test, rankdata

from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import EvaluationResult
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment

CHANCE = 0.05
"""p-value from which a correlation counts as not shown."""
FEWEST_MODELS = 3
RANDOM_PAIRINGS = 99_999
"""Number of random pairings if there are more than this: above 8 models."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rank correlation of two numbers over a set of models.

    Attributes:
        metric, score: Names of the two numbers.
        coefficient: From -1 to 1; equal values share the mean of their ranks.
        p_value: Two-sided: the share of pairings whose coefficient is at least as far from 0, among all pairings of
            the two sets of values (`exact`) or among `pairings` random ones.
        least_p_value: The smallest possible p_value for this number of models without equal values.
    """

    metric: str
    score: str
    models: tuple[str, ...]
    coefficient: float
    p_value: float
    least_p_value: float
    pairings: int
    exact: bool

    def __str__(self) -> str:
        pairings = "all pairings" if self.exact else f"{self.pairings:,} random pairings"
        count = len(self.models)
        shown = "" if self.p_value < CHANCE else " That does not show a correlation."
        least = f"; at least {self.least_p_value:.2g} for {count} models" if self.least_p_value >= CHANCE / 5 else ""
        return (
            f"Over {count} models, {self.metric} and {self.score} have a rank correlation of "
            f"{self.coefficient:.2f} (Spearman; p = {self.p_value:.2g} over {pairings}{least}).{shown}"
        )


def rank_correlation(
    metric: Mapping[str, float],
    score: Mapping[str, float],
    metric_name: str = "metric",
    score_name: str = "score",
    seed: int = 0,
) -> RankCorrelation:
    """Spearman's coefficient of two numbers per model, and how often chance gives as strong a correlation.

    Args:
        metric, score: Model -> number, for the same models.
        metric_name, score_name: Names of the two numbers in the result and in errors.
        seed: Seed of the random pairings, which are drawn for more than 8 models.

    Raises:
        ValueError: for different models, fewer than 3, and numbers that are not finite or all equal.
    """
    if set(metric) != set(score):
        raise ValueError(
            f"{metric_name} and {score_name} must have the same models, but only one has "
            f"{sorted(set(metric) ^ set(score))}."
        )
    models = tuple(metric)
    if len(models) < FEWEST_MODELS:
        raise ValueError(f"A rank correlation needs at least {FEWEST_MODELS} models, got {len(models)}: {models}.")
    columns = []
    for name, values in ((metric_name, metric), (score_name, score)):
        column = np.array([values[model] for model in models], np.float64)
        if not np.isfinite(column).all():
            raise ValueError(f"{name} must be finite for all models, got {dict(values)}.")
        if np.ptp(column) == 0:
            raise ValueError(f"{name} is {column[0]:g} for all models, so it does not rank them.")
        columns.append(column)
    first, second = (_unit_ranks(column) for column in columns)
    every = math.factorial(len(models))
    exact = every <= RANDOM_PAIRINGS
    test = permutation_test(
        (second,),
        lambda values, axis: np.abs(values @ first).round(9),  # equal coefficients differ by rounding errors
        permutation_type="pairings",
        vectorized=True,
        n_resamples=RANDOM_PAIRINGS,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    return RankCorrelation(
        metric=metric_name,
        score=score_name,
        models=models,
        coefficient=min(max(float(first @ second), -1.0), 1.0),
        p_value=float(test.pvalue),
        least_p_value=2 / every if exact else 1 / (RANDOM_PAIRINGS + 1),
        pairings=every if exact else RANDOM_PAIRINGS,
        exact=exact,
    )


def _unit_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks (equal values share their mean rank) scaled to mean 0 and norm 1: their product is the coefficient."""
    ranks = rankdata(values)
    ranks -= ranks.mean()
    unit: np.ndarray = ranks / np.linalg.norm(ranks)
    return unit


def misalignment_and_loss(diagnosis: Diagnosis) -> RankCorrelation:
    """The rank correlation of misalignment and the loss in the last doubling over the models that have both."""
    measured = {model.evaluation.model: (model.evaluation, model.part(Misalignment)) for model in diagnosis.models}
    misalignment = {name: part.mean for name, (_, part) in measured.items() if part is not None}
    loss = {name: late_loss(measured[name][0]) for name in misalignment}
    return rank_correlation(misalignment, loss, "misalignment", "loss in the last octave")


def late_loss(evaluation: EvaluationResult) -> float:
    curve, (start, stop) = evaluation.position_wise.coarse, evaluation.harm.last_range
    bins = [
        (b - a, mean)
        for (a, b), mean in zip(pairwise(curve.edges), curve.mean, strict=True)
        if a >= start and b <= stop
    ]
    return sum(width * mean for width, mean in bins) / sum(width for width, _ in bins)


if __name__ == "__main__":
    print(misalignment_and_loss(read_result(sys.argv[1], Diagnosis)))
