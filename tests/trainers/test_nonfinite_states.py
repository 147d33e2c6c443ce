"""States that are not finite or explode are named, and stop the run; what is logged."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, map_state
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.run.step_checks import (
    StepLogs,
    describe_broken,
    part_norms,
    recurrent_rms,
    zero_rows,
)
from tests.trainers import toys


def state_of_ones(rows: int = 3) -> RecurrentState:
    """Two layers of four recurrent numbers, the first without a conv part."""
    ones = torch.ones(rows, 2, 2)
    return LayerState(ones, torch.zeros(rows, 0)), LayerState(ones.clone(), torch.ones(rows, 5))


def test_norms_and_root_mean_squares_are_those_computed_by_hand() -> None:
    state = state_of_ones(2)
    state[0].recurrent[1] = torch.tensor([[1.0, -1.0], [3.0, 5.0]])
    norms = part_norms(state)
    assert norms[:, :, 0].tolist() == [[2.0, 0.0], [2.0, pytest.approx(5**0.5)]]
    assert recurrent_rms(state, norms).tolist() == [[1.0, 3.0], [1.0, 1.0]]  # (1 + 1 + 9 + 25) / 4 = 9


def test_layers_without_a_recurrent_part_have_no_root_mean_square() -> None:
    """Neither NaN, as 0 / 0 is, nor a zero that lowers the mean."""
    whole = state_of_ones(2)
    whole[0].recurrent[1] *= 3
    empty = LayerState(torch.zeros(2, 0), torch.ones(2, 5))
    state = (empty, whole[0], empty, whole[1])
    assert recurrent_rms(state, part_norms(state)).tolist() == [[1.0, 3.0], [1.0, 1.0]]
    assert recurrent_rms((empty,), part_norms((empty,))).shape == (0, 2)


def test_a_row_starts_from_zero_if_all_of_its_state_is_zero() -> None:
    """Whatever the first layer has: here nothing, then a convolution only."""
    state = map_state(torch.zeros_like, (LayerState(torch.ones(4, 0), torch.ones(4, 0)), *state_of_ones(4)))
    assert zero_rows(None) == zero_rows(state) == (1.0, False)
    state[1].recurrent[1, 0, 1] = 1.0
    assert zero_rows(state) == (0.75, False)
    state[2].conv[3] = 1.0
    assert zero_rows(state) == (0.5, False)
    for value in (math.nan, math.inf):
        state[2].conv[2, 1] = value
        assert zero_rows(state) == (0.25, True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_by_layer_part_and_rows(value: float) -> None:
    state = state_of_ones()
    state[1].conv[2, 4] = value
    assert describe_broken(part_norms(state)) == "layer 1, part 'conv' has NaN or infinite values in rows [2]"
    state[1].recurrent[0, 1, 1] = value
    assert describe_broken(part_norms(state)) == "layer 1, part 'recurrent' has NaN or infinite values in rows [0]"


# --- in training ---


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., StatePassingTrainer]:
    """A trainer of four steps with two micro-batches of two rows that sum their ids."""

    def make(**fields: Any) -> StatePassingTrainer:
        settings = {
            "state_drop_probability": 0.0,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 0.0,
            "logging_steps": 1,
            "save_steps": 1,
        }
        items = [{"input_ids": torch.tensor([i + 1, 100 * (i + 1)])} for i in range(16)]
        config = StatePassingConfig(str(tmp_path), **toys.QUIET | settings | fields)
        return StatePassingTrainer(toys.SumModel(), config, train_dataset=items)

    return make


def starts_and_ends(trainer: StatePassingTrainer) -> list[tuple[list[float], list[float]]]:
    return [
        (starts, [start + sum(ids) for start, ids in zip(starts, rows, strict=True)])
        for _, rows, starts, _ in trainer.model.seen
    ]


def test_a_final_state_that_is_not_finite_stops(run: Callable[..., StatePassingTrainer]) -> None:
    trainer = run()
    trainer.model.poisoned_pass = 5
    with pytest.raises(
        ValueError,
        match=r"final_state of step 2, micro-batch 1: layer 0, part 'recurrent' has NaN or infinite values in rows "
        r"\[1\]\. The newest complete checkpoint is .*checkpoint-2",
    ):
        trainer.train()


def test_a_loss_that_is_not_finite_stops(run: Callable[..., StatePassingTrainer]) -> None:
    trainer = run()
    trainer.model.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="The loss of step 0, micro-batch 0 is nan"):
        trainer.train()


def test_weights_that_are_not_finite_are_not_saved(run: Callable[..., StatePassingTrainer], tmp_path: Path) -> None:
    trainer = run(save_total_limit=1)
    trainer.model.weight.register_hook(lambda gradient: gradient * (math.nan if trainer.state.global_step == 2 else 1))
    with pytest.raises(
        ValueError,
        match=r"weights after step 3 have NaN or infinite values, first in weight: no checkpoint is written\. "
        r"The newest complete checkpoint is .*checkpoint-2",
    ):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_the_log_has_the_size_of_the_states_and_the_share_of_zero_ones(
    run: Callable[..., StatePassingTrainer],
) -> None:
    trainer = run(state_drop_probability=0.4, logging_steps=2)
    trainer.train()
    seen = starts_and_ends(trainer)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for index, entry in enumerate(logged):
        part = seen[4 * index : 4 * index + 4]
        starts = [start for starts, _ in part for start in starts]
        ends = [end for _, ends in part for end in ends]
        assert entry["zero_states"] == starts.count(0.0) / 8
        assert entry["state_rms"] == pytest.approx(sum(ends) / 8, rel=1e-4)  # of one number, so its size
        assert entry["state_rms_max"] == pytest.approx(max(ends), rel=1e-4)


def test_logs_are_means_and_maxima_over_micro_batches_and_processes() -> None:
    logs = StepLogs()
    assert logs.take(list) == {}
    for value in (1.0, 3.0):
        logs.add(size=torch.tensor(value), size_max=torch.tensor(value))
    other = {"size": 6.0, "size_max": 7.0}
    assert logs.take(lambda own: [*own, other]) == {"size": 4.0, "size_max": 7.0}
    assert logs.take(list) == {}


@pytest.mark.parametrize(
    ("method", "is_logged"), [("zero state", False), ("alignment", False), ("state passing", True)]
)
def test_the_share_of_zero_states_is_logged_where_a_method_gives_some(
    tmp_path: Path, method: str, is_logged: bool
) -> None:
    trainer = toys.resumable_trainer(tmp_path, method=method, max_steps=1, save_strategy="no")
    trainer.train()
    assert ("zero_states" in trainer.state.log_history[0]) == is_logged
