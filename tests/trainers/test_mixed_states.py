"""Mixtures of sources: which row takes which source, by hand-computed keys."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.records import Settings
from hf_recurrent_lengthgen.evaluation.json_schema import from_plain, to_plain
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers import (
    BatchPlace,
    FittedNoise,
    InitialStateSource,
    MixedStates,
    MixedStatesConfig,
    MixedStatesTrainer,
    PassedStates,
    ZeroStates,
)
from tests.trainers import toys

CPU = torch.device("cpu")


class Constant(ZeroStates):
    """Gives the same number everywhere."""

    def __init__(self, value: float) -> None:
        self._value = value

    def initial_state(self, place: BatchPlace) -> RecurrentState:  # type: ignore[override]
        full = torch.full((place.rows, 2), self._value)
        return (LayerState(full, -full),)


def chosen(shares: dict[str, float], seed: int, step: int, micro_batch: int, row: int) -> str:
    """The source of a row: the names in alphabetic order share the interval from 0 to 1."""
    draw = toys.keyed_uniform("mixture", seed, step, micro_batch, row)
    for name in sorted(shares):
        if draw < shares[name]:
            return name
        draw -= shares[name]
    raise AssertionError("shares do not add up to 1")


def test_each_row_takes_the_source_of_the_hand_computed_key() -> None:
    shares = {"b": 0.2, "a": 0.5, "c": 0.3}
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    source = MixedStates({name: Constant(value) for name, value in values.items()}, shares)
    counts: Counter[str] = Counter()
    for step in range(40):
        names = [chosen(shares, 7, step, 1, row) for row in range(2, 10)]
        state = source.initial_state(BatchPlace(7, step, 1, 2, 8))
        assert state is not None
        assert state[0].recurrent.tolist() == [[values[name]] * 2 for name in names]
        assert state[0].conv.tolist() == [[-values[name]] * 2 for name in names]
        counts.update(names)
    for name, share in shares.items():  # three standard deviations
        assert abs(counts[name] / 320 - share) < 3 * (share * (1 - share) / 320) ** 0.5


def test_every_source_sees_every_final_state() -> None:
    def zero(rows: int) -> RecurrentState:
        return (LayerState(torch.zeros(rows, 1, 1), torch.zeros(rows, 0)),)

    parts: dict[str, InitialStateSource] = {"fitted_noise": FittedNoise(zero), "state_passing": PassedStates(0.0)}
    source = MixedStates(parts, {"fitted_noise": 0.9, "state_passing": 0.1})
    final = (LayerState(torch.tensor([[[1.0]], [[3.0]], [[8.0]]]), torch.zeros(3, 0)),)
    source.observe(BatchPlace(0, 0, 0, 0, 3), final)
    source.end_step()
    fitted = parts["fitted_noise"]
    assert isinstance(fitted, FittedNoise)
    assert fitted.statistics is not None
    assert fitted.statistics[0].mean.tolist() == [4.0]
    assert fitted.statistics[0].variance.tolist() == pytest.approx([(9 + 1 + 16) / 3])
    tensors = source.state_dict()
    assert tensors["state_passing.micro_batches.0.layers.0.recurrent"].flatten().tolist() == [1.0, 3.0, 8.0]
    assert source.logs()["fitted_mean_rms"] == 4.0

    copies: dict[str, InitialStateSource] = {"fitted_noise": FittedNoise(zero), "state_passing": PassedStates(0.0)}
    copy = MixedStates(copies, {"fitted_noise": 0.9, "state_passing": 0.1})
    copy.load_state_dict(tensors, CPU)
    places = [BatchPlace(0, step, 0, 0, 3) for step in range(1, 9)]
    for place in places:
        torch.testing.assert_close(copy.initial_state(place), source.initial_state(place), rtol=0, atol=0)
    source.reset()
    assert source.state_dict() == {}


def test_rows_of_a_training_run_start_where_the_mixture_says(tmp_path: Path) -> None:
    shares = {"zero": 0.2, "state_passing": 0.4, "random_noise": 0.4}
    config = MixedStatesConfig(
        str(tmp_path),
        **toys.QUIET,
        mixture='{"zero": 0.2, "state_passing": 0.4, "random_noise": {"share": 0.4, "noise_sigma": 0.25}}',
        save_strategy="no",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=4,
        learning_rate=0.0,
        logging_steps=1,
        seed=9,
    )
    items = [{"input_ids": torch.tensor([i + 1, 100 * (i + 1)])} for i in range(16)]
    trainer = MixedStatesTrainer(toys.SumModel(), config, train_dataset=items)
    trainer.train()
    (recorded,) = trainer.run_record.settings(trainer)
    assert recorded.method["mixture"] == shares | {"random_noise": {"share": 0.4, "noise_sigma": 0.25}}
    assert from_plain(to_plain(recorded), Settings) == recorded
    carried = {(micro_batch, row): (0.0, 0.0) for micro_batch in range(2) for row in range(4)}
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    passed = 0
    for step in range(8):
        zeros = 0
        for micro_batch in range(2):
            _, ids, recurrent, conv = trainer.model.seen[2 * step + micro_batch]
            for row in range(4):
                name = chosen(shares, 9, step, micro_batch, row)
                noise = (0.25 * toys.keyed_normal(1, 9, step, micro_batch, row).item(), 0.0)
                start = {"zero": (0.0, 0.0), "random_noise": noise, "state_passing": carried[micro_batch, row]}[name]
                assert (recurrent[row], conv[row]) == pytest.approx(start, rel=1e-6)
                carried[micro_batch, row] = (recurrent[row] + sum(ids[row]), conv[row] + 2)
                zeros += start[0] == 0
                passed += name == "state_passing" and step > 0
        assert logged[step]["zero_states"] == pytest.approx(zeros / 8)
    assert passed > 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "mixture must be a JSON object with shares of some of"),
        ({"mixture": "zero: 1"}, "mixture must be a JSON object"),
        ({"mixture": {"zero": "a"}}, "shares of a mixture"),
        ({"mixture": {"zero": 0.5, "dreams": 0.5}}, "mixture must give shares to some of .*dreams"),
        ({"mixture": {"zero": 0.5, "mixed": 0.5}}, r", got \['mixed'\]"),
        ({"mixture": {"zero": 0.5, "state_passing": 0.4}}, "add up to 1"),
        ({"mixture": {"zero": 1.5, "state_passing": -0.5}}, "at least 0 and add up to 1"),
        ({"mixture": {"tbtt": 0.5, "state_passing": 0.5}}, "leave one of them out"),
        (
            {"mixture": {"zero": {"share": 1.0, "noise_sigma": 0.1}}},
            "noise_sigma is not a setting of zero.* Allowed settings: none",
        ),
        (
            {"mixture": {"random_noise": {"share": 1.0, "fitted_noise_beta": 0.1}}},
            r"fitted_noise_beta is not a setting of random_noise in a mixture. Allowed settings: \['noise_sigma'\]",
        ),
        ({"mixture": {"random_noise": {"share": 1.0, "noise_sigma": -1.0}}}, "noise_sigma must be"),
        ({"mixture": {"random_noise": {"noise_sigma": 1.0}}}, "add up to 1"),
        (
            {"mixture": {"tbtt": {"share": 1.0, "state_drop_probability": 0.1}}},
            "is not a setting of tbtt",
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedStatesConfig(str(tmp_path), **fields)


def test_data_must_suit_the_sources(tmp_path: Path) -> None:
    def make(mixture: dict[str, float], data: Any) -> MixedStatesTrainer:
        config = MixedStatesConfig(str(tmp_path), **toys.QUIET, mixture=mixture)
        return MixedStatesTrainer(toys.tiny_model(), config, train_dataset=data)

    with pytest.raises(ValueError, match="needs sequences that continue"):
        make({"zero": 0.1, "tbtt": 0.9}, toys.sequences(8))
    with pytest.raises(ValueError, match="use TbttTrainer"):
        make({"zero": 0.1, "state_passing": 0.9}, toys.chunks(8))
    make({"zero": 0.1, "tbtt": 0.9}, toys.chunks(8)).train()
