import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from hf_recurrent_lengthgen.evaluation.statistics import bin_means, position_edges, shown_above, t_interval


def test_t_interval_of_hand_computed_numbers() -> None:
    # Mean 3, s^2 = (4 + 1 + 0 + 9) / 3; t table with 3 degrees of freedom: 3.182 (95 %), 5.841 (99 %).
    values = np.array([[1.0], [2.0], [3.0], [6.0]])
    for confidence, quantile in ((0.95, 3.182446), (0.99, 5.840909)):
        interval: Any = t_interval(values, confidence)
        half = quantile * math.sqrt(14 / 3 / 4)
        np.testing.assert_allclose(
            [interval.mean[0], interval.low[0], interval.high[0]], [3, 3 - half, 3 + half], rtol=1e-6
        )


def test_one_sequence_has_a_mean_and_no_interval() -> None:
    interval = t_interval(np.array([[2.0, 4.0]]))
    assert interval.mean.tolist() == [2, 4]
    assert interval.low is None
    assert interval.high is None


def test_edges_are_exact_then_logarithmic_with_the_training_length_among_them() -> None:
    edges = position_edges(4096, 64, exact_until=8, bins_per_doubling=2)
    logarithmic = (8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096)
    assert edges == (*range(8), *logarithmic)


def test_edges_without_an_exact_part() -> None:
    assert position_edges(40, 10, bins_per_doubling=1) == (0, 1, 2, 5, 10, 20, 40)


@pytest.mark.parametrize(
    ("length", "edges"),
    [
        (29, (0, 1, 2, 5, 10, 29)),  # 20..29 is below half of 20..40 and joined
        (30, (0, 1, 2, 5, 10, 20, 30)),
        (3, (0, 1, 3)),
        (1, (0, 1)),
    ],
)
def test_a_last_bin_cut_below_half_is_joined(length: int, edges: tuple[int, ...]) -> None:
    assert position_edges(length, 10, bins_per_doubling=1) == edges


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 300, 4096, 100_000, 2**20])
@pytest.mark.parametrize("training_length", [4, 64, 1000, 2048])
def test_edges_cover_every_position_once(length: int, training_length: int) -> None:
    edges = position_edges(length, training_length, 256, 16)
    assert edges[0] == 0
    assert edges[-1] == length
    assert (np.diff(edges) > 0).all()
    assert set(range(min(length, 256))) <= set(edges)
    if training_length * 2 <= length:
        assert training_length in edges


def test_bin_means_of_hand_computed_numbers() -> None:
    values = np.array([[1, 2, 3, 4, 100], [0, 0, 6, 0, 100]], np.float32)
    np.testing.assert_array_equal(bin_means(values, (0, 1, 4)), [[1, 3], [0, 2]])
    np.testing.assert_array_equal(bin_means(values, (2, 4)), [[3.5], [3]])
    assert bin_means(values, (0, 5)).dtype == np.float64


@pytest.mark.parametrize("edges", [(0,), (0, 6), (0, 3, 3), (2, 1), (-1, 2)])
def test_bins_outside_the_values_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="edges must increase"):
        bin_means(np.zeros((1, 5)), edges)


def test_several_means_are_shown_step_by_step_as_holm_sorts_them() -> None:
    random = np.random.default_rng(0)
    for count in (2, 5, 32):
        values = random.standard_normal((count, 12)) + np.linspace(0, 2, 12)
        test = ttest_1samp(values, 0.5, alternative="greater")
        order, shown = test.pvalue.argsort(), np.zeros(12, dtype=bool)
        for step, index in enumerate(order):
            if test.pvalue[index] > 0.025 / (12 - step):
                break
            shown[index] = True
        interval: Any = t_interval(values)
        found = shown_above(interval.mean.tolist(), interval.low.tolist(), 0.5, count)
        assert found.tolist() == shown.tolist()
    assert not shown_above([9.0], None, 0, 1).any()
