import math

import numpy as np
import pytest

from hf_recurrent_lengthgen.metrics.context_harm.measure import length_verdict

EDGES = (0, 4, 8, 16, 32, 64, 128)  # trained on 16


def sequences(means: list[float], spread: float) -> np.ndarray:
    """Four sequences around `means`; even bins differ between the first two of them, odd bins between the others."""
    signs = np.array([[1, -1, 0, 0], [0, 0, 1, -1]] * 3)[: len(means)].T
    return np.array(means) + spread * signs


def test_a_curve_that_keeps_falling_holds_to_the_end() -> None:
    verdict = length_verdict(EDGES, sequences([3, 2.5, 2, 1.9, 1.9, 1.8], 0.001), 16)
    assert verdict.best_bin == (8, 16)
    assert verdict.best_nll == pytest.approx(2)
    assert verdict.holds_to == 128
    assert verdict.violated_from is None


def test_a_curve_that_rises_holds_to_the_first_bin_above_the_tolerance() -> None:
    verdict = length_verdict(EDGES, sequences([3, 2.5, 2, 2.009, 2.02, 4], 0.001), 16)
    assert verdict.holds_to == 32
    assert verdict.violated_from == 32
    np.testing.assert_allclose(verdict.excess.mean, [1, 0.5, 0, 0.009, 0.02, 2], atol=1e-12)


def test_the_best_bin_may_lie_before_the_training_length_and_is_never_beyond_it() -> None:
    verdict = length_verdict(EDGES, sequences([3, 2, 2.5, 1, 1, 1], 0.001), 16)
    assert verdict.best_bin == (4, 8)
    assert verdict.holds_to == 8
    assert verdict.violated_from == 8


def test_noise_delays_the_proven_violation_and_pairing_removes_common_noise() -> None:
    # Bins 3 and 4 exceed bin 2 by 0.3 alike. Bin 3 varies on its own: differences of +-0.5, s^2 = 4 * 0.25 / 3, and
    # an interval of 0.3 +- 3.182 * s / 2. Bin 4 varies as bin 2 does.
    verdict = length_verdict(EDGES, sequences([9, 9, 2, 2.3, 2.3, 5], 0.5), 16)
    assert verdict.holds_to == 16
    assert verdict.violated_from == 32
    assert verdict.excess.low is not None
    assert verdict.excess.low[3] == pytest.approx(0.3 - 3.182446 * math.sqrt(1 / 3) / 2, abs=1e-6)
    assert verdict.excess.low[4] == pytest.approx(0.3, abs=1e-12)


def test_one_sequence_proves_nothing() -> None:
    verdict = length_verdict(EDGES, np.array([[3, 2, 1, 5, 5, 5.0]]), 16)
    assert verdict.holds_to == 16
    assert verdict.violated_from is None
    assert verdict.excess.low is None


def test_the_tolerance_is_a_fraction_of_perplexity() -> None:
    curve = sequences([3, 2.5, 2, 2 + math.log(1.1) - 1e-9, 2 + math.log(1.1) + 1e-6, 4], 0)
    assert length_verdict(EDGES, curve, 16, tolerance=0.1).holds_to == 32
    assert length_verdict(EDGES, curve, 16, tolerance=0.2).holds_to == 64
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        length_verdict(EDGES, curve, 16, tolerance=-0.1)


def test_a_training_length_between_edges_is_refused() -> None:
    with pytest.raises(ValueError, match="training length 20 must be one of the bin edges"):
        length_verdict(EDGES, np.zeros((2, 6)), 20)
