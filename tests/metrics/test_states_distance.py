"""Distances of states whose distribution is made by hand."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen.evaluation.streaming import Chunk
from hf_recurrent_lengthgen.metrics.states.distance import Drift, state_drift
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver, StateTrajectory, sample_positions
from hf_recurrent_lengthgen.models.state_value import LayerState

T, POSITIONS = 64, (32, 40, 48, 56, 64, 128, 256, 512)
PLACE = {position: place for place, position in enumerate(POSITIONS)}


def trajectory_of(states: np.ndarray, positions: tuple[int, ...] = POSITIONS) -> StateTrajectory:
    """Of a made-up model with one layer; states (n, S, H, P, N)."""
    layer = LayerState(torch.zeros(1, *states.shape[2:]), torch.zeros(1, 0))
    model: Any = torch.nn.Module()
    model.zero_state, model.config = lambda rows: (layer,), SimpleNamespace(model_type="made up")
    observer = StateObserver(model, states.shape[1], positions)
    start = 0
    for position, state in zip(positions, states, strict=True):
        nll = torch.zeros(len(state), position - start)
        observer.see(
            0, Chunk(start, nll, (LayerState(torch.tensor(state.copy()).float(), torch.zeros(len(state), 0)),))
        )
        start = position
    return observer.trajectory()


def drift_of(states: np.ndarray, positions: tuple[int, ...] = POSITIONS, smallest: float = 1.0) -> Drift:
    (drift,) = state_drift(trajectory_of(states, positions), T, smallest)
    return drift


def normal(heads: int = 1, sequences: int = 16, seed: int = 0, n: int = len(POSITIONS)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, sequences, heads, 16, 16))


@pytest.mark.parametrize(("shift", "scale"), [(3.0, 1.0), (0.0, 4.0), (-2.0, 2.5), (0.0, 0.25)])
def test_distance_of_normal_distributions_is_the_known_one(shift: float, scale: float) -> None:
    states = normal()
    states[PLACE[128] :] = shift + scale * states[PLACE[128] :]
    drift = drift_of(5 + 7 * states)  # units do not matter
    expected = math.hypot(shift, scale - 1)
    np.testing.assert_allclose(drift.distance[PLACE[128] :, 0], expected, rtol=0.03)
    assert drift.drifts[0] == (expected > 1)
    assert drift.leaves_at == (128 if expected > 1 else None,)
    np.testing.assert_allclose(drift.distance[: PLACE[128], 0], 0, atol=0.06)
    assert drift.late[0] == pytest.approx(drift.distance[PLACE[512], 0])


def test_distance_is_that_between_sorted_elements() -> None:
    random = np.random.default_rng(1)
    states = normal()
    states[-1] = random.exponential(3, states[-1].shape) - 1
    reference = states[1 : PLACE[64] + 1]  # 40 to 64
    pooled = np.quantile(reference, (np.arange(states[-1].size) + 0.5) / states[-1].size)
    expected = np.sqrt(((np.sort(states[-1].ravel()) - pooled) ** 2).mean()) / reference.std()
    assert drift_of(states).distance[-1, 0] == pytest.approx(expected, rel=0.02)


def test_the_drifting_head_is_named_with_where_it_leaves() -> None:
    states = normal(heads=6)
    for place, position in enumerate(POSITIONS):
        states[place, :, 4] *= max(1, position / 160)  # 1.6 and 3.2 times at 256 and 512
    drift = drift_of(states)
    assert drift.drifts.tolist() == [False] * 4 + [True, False]
    assert drift.leaves_at == (None, None, None, None, 512, None)


def autoregressive(memory: np.ndarray, positions: tuple[int, ...], sequences: int, seed: int) -> np.ndarray:
    """Stationary states of heads with exp(-1 / memory) kept per token, elements independent: (n, S, H, 8, 8)."""
    random = np.random.default_rng(seed)
    state, states, before = random.normal(size=(sequences, len(memory), 8, 8)), [], positions[0]
    for position in positions:
        kept = np.exp(-(position - before) / memory)[:, None, None]
        state = kept * state + np.sqrt(1 - kept**2) * random.normal(size=state.shape)
        states.append(state * (1 + 0.3 * random.normal(size=(sequences, 1, 1, 1))))  # texts differ
        before = position
    return np.stack(states)


def test_no_head_is_named_where_nothing_drifts() -> None:
    positions = sample_positions(64 * T, T)
    memory = np.geomspace(1, 10 * T, 50)
    for seed in range(2):
        drift = drift_of(autoregressive(memory, positions, 4, seed), positions, smallest=0.0)
        assert not drift.drifts.any()


def slow_topics(heads: int, positions: tuple[int, ...], sequences: int, seed: int) -> np.ndarray:
    """Stationary states whose mean goes from one text's topic to another's within 6 T tokens: (n, S, H, 8, 8)."""
    random = np.random.default_rng(seed)
    topic, states, before = random.normal(size=(sequences, heads, 1, 1)), [], positions[0]
    for position in positions:
        kept = math.exp(-(position - before) / (6 * T))
        topic = kept * topic + math.sqrt(1 - kept**2) * random.normal(size=topic.shape)
        states.append(2 * topic + 0.3 * random.normal(size=(sequences, heads, 8, 8)))
        before = position
    return np.stack(states)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [4, 8])
def test_texts_that_change_slowly_do_not_drift(sequences: int) -> None:
    """Also where a text is unlike what it was, by more than 1, which it is in several heads here."""
    positions = sample_positions(64 * T, T)
    drift = drift_of(slow_topics(300, positions, sequences, seed=0), positions)
    assert (drift.late > np.maximum(drift.null, 1)).sum() > 3
    assert not drift.drifts.any()


def test_the_rise_is_judged_for_all_heads_together() -> None:
    """A rise that is enough for a head alone is too uncertain among 40 heads; a certain one is found among them."""
    states = normal(heads=40, sequences=4)
    states[PLACE[128] :, :, 0] *= np.array([3.0, 4.0, 5.0, 7.0])[:, None, None]  # rises 2, 3, 4, 6: t = 4.4 of 3.2
    states[PLACE[128] :, :, 1] *= 4
    assert drift_of(states[:, :, :1]).drifts[0]
    assert drift_of(states).drifts.nonzero()[0].tolist() == [1]


@pytest.mark.parametrize(("sequences", "measured"), [(2, False), (3, False), (4, True)])
def test_few_texts_measure_no_drift(sequences: int, measured: bool) -> None:
    states = normal(sequences=sequences)
    states[PLACE[128] :] += 50
    drift = drift_of(states)
    assert drift.late[0] > 30
    assert drift.drifts[0] == measured


def test_rounding_of_equal_elements_is_no_drift() -> None:
    rounded = 1 + 1e-7 * np.arange(len(POSITIONS))
    moved = np.where(np.arange(len(POSITIONS)) < PLACE[128], 1.0, 1.001)
    states = np.ones((len(POSITIONS), 4, 2, 4, 4))
    states *= 300 * np.stack([rounded, moved], 1)[:, None, :, None, None]
    dead = np.zeros_like(states[:, :, :1])
    drift = drift_of(np.concatenate([states, dead], 2))
    assert drift.drifts.tolist() == [False, True, False]
    assert np.isfinite(drift.distance).all()
    assert drift.distance[:, 0].max() < 0.2
    np.testing.assert_allclose(drift.distance[PLACE[128] :, 1], 100, rtol=0.01)


def test_one_deviating_text_is_no_drift() -> None:
    states = normal(sequences=8)
    states[PLACE[256] :, 3] *= 10
    drift = drift_of(states)
    assert drift.late[0] > 2 > drift.null[0]
    assert not drift.drifts[0]
    assert drift.leaves_at == (None,)


def test_what_drifts_inside_training_already_needs_more_to_be_named() -> None:
    steady, rising = normal(), normal()
    steady[PLACE[128] :] *= 1.7
    rising *= np.array([1, 2, 4, 8, 16, 16, 16, 16])[:, None, None, None, None]
    one, other = drift_of(steady, smallest=0.1), drift_of(rising, smallest=0.1)
    np.testing.assert_allclose([one.late[0], other.late[0]], 0.8, atol=0.1)
    assert one.drifts[0]
    assert not other.drifts[0]
    assert not drift_of(steady).drifts[0]  # below 1, which is the default


def test_order_of_elements_and_of_sequences_makes_no_difference() -> None:
    random = np.random.default_rng(2)
    states = normal(heads=2)
    states[PLACE[128] :, :, 1] += 2
    elements = random.permutation(256)
    shuffled = states.reshape(*states.shape[:3], 256)[..., elements].reshape(states.shape)
    np.testing.assert_allclose(drift_of(shuffled).distance, drift_of(states).distance, rtol=1e-5)
    swapped = states[:, random.permutation(16)]
    np.testing.assert_allclose(drift_of(swapped).distance, drift_of(states).distance, rtol=1e-9)
    np.testing.assert_allclose(drift_of(states[:, :, ::-1]).distance, drift_of(states).distance[:, ::-1], rtol=1e-9)


def test_one_text_is_enough_if_it_is_not_random() -> None:
    states = normal(heads=3, sequences=1)
    states[PLACE[256] :, :, 1] *= 4
    states[PLACE[56], :, 2] *= 6  # further inside training than beyond it
    states[PLACE[256] :, :, 2] *= 4
    (drift,) = state_drift(trajectory_of(states), T, fixed=True)
    assert drift.drifts.tolist() == [False, True, False]
    assert drift.leaves_at == (None, 256, None)
    assert drift.late[1] == pytest.approx(3, rel=0.1)


def test_too_little_data_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two sequences"):
        drift_of(normal(sequences=1))
    with pytest.raises(ValueError, match="some beyond"):
        drift_of(normal(n=5), POSITIONS[:5])
    with pytest.raises(ValueError, match=r"must have some in \(32, 64\]"):
        drift_of(normal(n=3), (16, 32, 128))
