"""Random and fitted noise against hand-computed statistics, keys and moments."""

import statistics
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers import (
    BatchPlace,
    FittedNoise,
    FittedNoiseConfig,
    FittedNoiseTrainer,
    RandomNoise,
    RandomNoiseConfig,
    RandomNoiseTrainer,
)
from tests.trainers import toys

CPU = torch.device("cpu")


def place(step: int = 0, micro_batch: int = 0, rows: int = 2, first_row: int = 0, seed: int = 0) -> BatchPlace:
    return BatchPlace(seed, step, micro_batch, first_row, rows)


def zeros(*shape: int) -> Callable[[int], RecurrentState]:
    """The zero state of two layers with recurrent parts of a shape, the second with a conv part."""
    return lambda rows: (
        LayerState(torch.zeros(rows, *shape), torch.zeros(rows, 0)),
        LayerState(torch.zeros(rows, *shape), torch.zeros(rows, 3, 2)),
    )


def final(*rows: list[list[float]]) -> RecurrentState:
    """Two layers (B, H, 1, N) of these heads; the second is ten times the first."""
    recurrent = torch.tensor(rows)[:, :, None]
    conv = torch.full((len(rows), 3, 2), 77.0)
    return LayerState(recurrent, torch.zeros(len(rows), 0)), LayerState(10 * recurrent, conv)


# Two rows of two heads of two elements, and the next step's.
FIRST = [[1.0, 3.0], [0.0, 0.0]], [[5.0, 7.0], [2.0, 2.0]]
SECOND = [[0.0, 0.0], [1.0, 1.0]], [[0.0, 4.0], [3.0, 3.0]]


@pytest.mark.parametrize("micro_batches", [1, 2], ids=["one micro-batch", "a micro-batch for each row"])
def test_statistics_are_those_computed_by_hand_over_two_steps(micro_batches: int) -> None:
    source = FittedNoise(zeros(2, 1, 2))

    def step(number: int, rows: tuple[list[list[float]], ...]) -> list[list[float]]:
        for micro_batch in range(micro_batches):
            source.observe(
                place(number, micro_batch, 2 // micro_batches),
                final(*rows) if micro_batches == 1 else final(rows[micro_batch]),
            )
        source.end_step()
        assert source.statistics is not None
        ten_times = source.statistics[1]
        torch.testing.assert_close(ten_times.mean, 10 * source.statistics[0].mean)
        torch.testing.assert_close(ten_times.variance, 100 * source.statistics[0].variance)
        return [values.tolist() for values in source.statistics[0]]

    # Head 0 is 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4. Head 1 is 0, 0, 2, 2.
    assert step(0, FIRST) == [[4.0, 1.0], [5.0, 1.0]]
    # Head 0 is 0, 0, 0, 4: mean 1, variance 3; head 1 is 1, 1, 3, 3. Nine tenths of these, one tenth of the old.
    mean, variance = step(1, SECOND)
    assert mean == pytest.approx([0.9 * 1 + 0.1 * 4, 0.9 * 2 + 0.1 * 1])
    assert variance == pytest.approx([0.9 * 3 + 0.1 * 5, 1.0])


def test_layers_without_a_recurrent_part_have_neither_statistics_nor_noise() -> None:
    """Of three layers the second, attention say, is left out; the others are as they are without it."""

    def beside_nothing(state: RecurrentState) -> RecurrentState:
        rows = len(state[0].recurrent)
        return state[0], LayerState(torch.zeros(rows, 0), torch.zeros(rows, 0)), state[1]

    plain = FittedNoise(zeros(2, 1, 2))
    source = FittedNoise(lambda rows: beside_nothing(zeros(2, 1, 2)(rows)))
    for step, rows in enumerate((FIRST, SECOND)):
        for each, state in ((plain, final(*rows)), (source, beside_nothing(final(*rows)))):
            each.observe(place(step), state)
            each.end_step()
    assert plain.statistics is not None
    assert source.statistics is not None
    assert [part.shape for part in source.statistics[1]] == [(0,), (0,)]
    torch.testing.assert_close((source.statistics[0], source.statistics[2]), plain.statistics, rtol=0, atol=0)
    assert source.logs() == plain.logs()
    noise, expected = source.initial_state(place(2)), plain.initial_state(place(2))
    assert noise is not None
    assert expected is not None
    torch.testing.assert_close((noise[0], noise[2]), expected, rtol=0, atol=0)
    assert [part.shape for part in noise[1]] == [(2, 0), (2, 0)]
    again = FittedNoise(source._zero_state)
    again.load_state_dict(source.state_dict(), CPU)
    torch.testing.assert_close(again.statistics, source.statistics, rtol=0, atol=0)


def test_all_processes_are_pooled() -> None:
    source = FittedNoise(zeros(2, 1, 2))
    sums: list[Tensor] = []
    other = FittedNoise(zeros(2, 1, 2))
    other.sum_over_processes = lambda own: sums.append(own) or own
    other.observe(place(first_row=1, rows=1), final(FIRST[1]))
    other.end_step()
    source.sum_over_processes = lambda own: own + sums[0]
    source.observe(place(rows=1), final(FIRST[0]))
    source.end_step()
    assert source.statistics is not None
    assert [values.tolist() for values in source.statistics[0]] == [[4.0, 1.0], [5.0, 1.0]]


def test_a_small_spread_around_a_large_mean_is_not_lost() -> None:
    values = 1000 + 0.01 * torch.randn(1, 1, 50, 50, generator=torch.Generator().manual_seed(0))
    source = FittedNoise(zeros(1, 50, 50))
    source.observe(place(rows=1), (LayerState(values, torch.zeros(1, 0)),))
    source.end_step()
    assert source.statistics is not None
    assert source.statistics[0].variance.item() == pytest.approx(values.double().var(correction=0).item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["random", "fitted"])
def test_noise_has_the_moments_of_its_settings(kind: str) -> None:
    heads, elements = 2, 60 * 50
    zero = zeros(heads, 60, 50)
    if kind == "random":
        source: RandomNoise | FittedNoise = RandomNoise(0.3, zero)
        means, deviations = [0.0, 0.0], [0.3, 0.3]
    else:
        source = FittedNoise(zero)
        means, deviations = [4.0, 1.0], [5.0**0.5, 1.0]
        source.observe(place(), final(*FIRST))
        source.end_step()
    state = source.initial_state(place(1, rows=4))
    assert state is not None
    for index, layer in enumerate(state):
        scale = 10.0 if kind == "fitted" and index else 1.0
        for head in range(heads):
            values = layer.recurrent[:, head].double()
            deviation = scale * deviations[head]
            assert values.mean().item() == pytest.approx(
                scale * means[head], abs=5 * deviation / (4 * elements) ** 0.5
            )
            assert values.std().item() == pytest.approx(deviation, rel=5 / (8 * elements) ** 0.5)
            within = (values - values.mean()).abs() < deviation
            assert within.double().mean().item() == pytest.approx(0.6827, abs=0.03)  # a Gaussian's
    assert not torch.equal(
        state[0].recurrent / state[0].recurrent.std(), state[1].recurrent / state[1].recurrent.std()
    )
    assert state[0].conv.shape == (4, 0)
    assert not bool(state[1].conv.any())


def test_noise_is_that_of_the_row_wherever_it_is() -> None:
    source = RandomNoise(2.0, zeros(2, 3, 4))
    together = source.initial_state(place(4, 1, rows=4))
    apart = [source.initial_state(place(4, 1, rows=2, first_row=first)) for first in (0, 2)]
    for index in range(2):
        assert torch.equal(together[index].recurrent, torch.cat([half[index].recurrent for half in apart]))
    again = source.initial_state(place(4, 1, rows=1, first_row=3))
    assert torch.equal(together[1].recurrent[3:], again[1].recurrent)


def test_noise_has_the_dtype_of_the_states() -> None:
    def double(rows: int) -> RecurrentState:
        return (LayerState(torch.zeros(rows, 2, 1, 2, dtype=torch.float64), torch.zeros(rows, 0)),)

    source = FittedNoise(double)
    source.observe(place(), final(*FIRST)[:1])
    source.end_step()
    for state in (source.initial_state(place(1)), RandomNoise(1.0, double).initial_state(place())):
        assert state is not None
        assert state[0].recurrent.dtype == torch.float64


# --- in training ---


def trained(tmp_path: Path, kind: str, **changes: Any) -> Any:
    fields = toys.QUIET | {
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "seed": 5,
    }
    items = [{"input_ids": torch.tensor([i + 1, 100 * (i + 1)])} for i in range(8)]
    if kind == "random":
        config: Any = RandomNoiseConfig(str(tmp_path), **fields | {"noise_sigma": 0.5} | changes)
        trainer: Any = RandomNoiseTrainer(toys.SumModel(), config, train_dataset=items, eval_dataset=items[:3])
    else:
        config = FittedNoiseConfig(str(tmp_path), **fields | changes)
        trainer = FittedNoiseTrainer(toys.SumModel(), config, train_dataset=items, eval_dataset=items[:3])
    trainer.train()
    return trainer


def test_random_noise_starts_every_row_from_its_own_draw(tmp_path: Path) -> None:
    trainer = trained(tmp_path, "random")
    draws = [
        [0.5 * toys.keyed_normal(1, 5, step, micro_batch, row).item() for row in range(2)]
        for step in range(4)
        for micro_batch in range(2)
    ]
    assert [recurrent for _, _, recurrent, _ in trainer.model.seen] == draws
    assert all(conv == [0.0, 0.0] for *_, conv in trainer.model.seen)


def test_fitted_noise_starts_from_the_statistics_of_the_steps_before(tmp_path: Path) -> None:
    trainer = trained(tmp_path, "fitted")
    seen = [(ids, recurrent) for _, ids, recurrent, _ in trainer.model.seen]
    mean = variance = None
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step in range(4):
        ends: list[float] = []
        for micro_batch in range(2):
            ids, starts = seen[2 * step + micro_batch]
            for row in range(2):
                draw = toys.keyed_normal(1, 5, step, micro_batch, row).item()
                expected = 0.0 if mean is None or variance is None else mean + variance**0.5 * draw
                assert starts[row] == pytest.approx(expected, rel=1e-5)
                ends.append(starts[row] + sum(ids[row]))
        new = statistics.fmean(ends), statistics.pvariance(ends)
        if mean is None or variance is None:
            mean, variance = new
        else:
            mean, variance = 0.9 * new[0] + 0.1 * mean, 0.9 * new[1] + 0.1 * variance
        assert logged[step]["fitted_mean_rms"] == pytest.approx(mean, rel=1e-4)
        assert logged[step]["fitted_std"] == pytest.approx(variance**0.5, rel=1e-4)
        assert logged[step]["zero_states"] == (step == 0)
    torch.testing.assert_close(
        trainer.initial_states.statistics[0], (torch.tensor([mean]), torch.tensor([variance])), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("beta", [-0.1, 1.0, nan])
def test_a_weight_of_the_past_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="fitted_noise_beta must be at least 0 and below"):
        FittedNoise(zeros(1), beta)
