"""Rank correlation of a metric with long-context scores over a set of models.

Du et al., 2025 (arXiv:2506.11769), Table 1, asks over 7 models how well long-short misalignment and training loss tell
which model is better at long contexts. Its coefficients are Spearman's (computed from the table's columns: 0.67, 0.88
and -0.95 as printed, and -0.56 where -0.59 is printed).

    misalignment = {name: long_short_misalignment(model, tokens, 2048).mean for name, model in models.items()}
    rank_correlation(misalignment, accuracies, "misalignment", "accuracy at 16k")

The p-value is the share of pairings of the two columns with at least as strong a correlation. With n models it is at
least 2 / n!, so 4 models (0.083) never suffice for 5 %.
"""

import math
from collections.abc import Mapping

import numpy as np
from scipy.stats import permutation_test, rankdata

from hf_recurrent_lengthgen.evaluation.diagnosis_results import RankCorrelation

FEWEST_MODELS = 3
RANDOM_PAIRINGS = 99_999
"""Number of random pairings if there are more than this: above 8 models."""


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
        metric_values=tuple(columns[0].tolist()),
        score_values=tuple(columns[1].tolist()),
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
