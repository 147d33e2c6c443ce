"""An interrupted run continues bit for bit: after a stop, a kill or a broken loss."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import hf_recurrent_lengthgen.trainers.run.checkpoints as checkpoints
from hf_recurrent_lengthgen.trainers import StatePassingTrainer
from tests.trainers import toys

STEPS = 8  # of toys.resumable_trainer; 4 per epoch
KILLS = ["weights", "optimizer.pt", "scheduler.pt", "rng_state", "initial_states", "trainer_state.json"]


class Outcome(NamedTuple):
    """All that training leaves."""

    weights: dict[str, Tensor]
    optimizer: list[Tensor]
    initial_states: dict[str, Tensor]
    log: list[tuple[float, float, float]]


def outcome(trainer: StatePassingTrainer) -> Outcome:
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    values = [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in log]
    return Outcome(toys.weights(trainer.model), moments, trainer.initial_states.state_dict(), values)


def assert_same(given: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(given[:3], expected[:3], rtol=0, atol=0)
    assert given.log == expected.log


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder and the outcome of a run that nothing interrupts."""
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    trainer = toys.resumable_trainer(output_dir)
    trainer.train()
    whole = outcome(trainer)
    assert len(whole.log) == STEPS
    assert len(whole.initial_states) == 8  # two micro-batches of two layers of two parts
    assert all(torch.is_nonzero(part.abs().sum()) for part in whole.initial_states.values())
    return output_dir, whole


def resume(output_dir: Path, checkpoint: str | bool = True, **changes: Any) -> Outcome:
    trainer = toys.resumable_trainer(output_dir, **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return outcome(trainer)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("step", range(1, STEPS))
def test_resuming_from_any_step_equals_the_whole_run(
    whole_run: tuple[Path, Outcome], tmp_path: Path, step: int
) -> None:
    output_dir, whole = whole_run
    assert_same(resume(tmp_path, str(output_dir / f"checkpoint-{step}")), whole)


def test_the_newest_checkpoint_is_taken_and_none_is_an_error(whole_run: tuple[Path, Outcome], tmp_path: Path) -> None:
    output_dir, whole = whole_run
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*train without resume_from_checkpoint"):
        toys.resumable_trainer(tmp_path).train(resume_from_checkpoint=True)
    for step in (2, 6):
        shutil.copytree(output_dir / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    trainer = toys.resumable_trainer(tmp_path)
    first_steps: list[int] = []
    trainer.add_callback(toys.OnStep(6, lambda: first_steps.append(6)))
    trainer.add_callback(toys.OnStep(2, lambda: first_steps.append(2)))
    trainer.train(resume_from_checkpoint=True)
    assert first_steps == [6]
    assert_same(outcome(trainer), whole)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("steps", "now", "method"),
    [
        pytest.param(3, 3, "state passing", id="within an epoch"),
        pytest.param(4, 4, "state passing", id="at the end of an epoch"),
        pytest.param(3, 2, "state passing", id="beyond max_steps"),
    ],
)
def test_a_finished_run_returns_its_weights_and_is_not_trained_further(
    tmp_path: Path, steps: int, now: int, method: str
) -> None:
    first = toys.resumable_trainer(tmp_path, method=method, max_steps=steps)
    first.train()
    each_epoch = {"save_strategy": "epoch", "logging_strategy": "epoch"}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = toys.resumable_trainer(tmp_path, method=method, max_steps=now, **each_epoch)
    done = again.train(resume_from_checkpoint=True)
    toys.assert_same_weights(toys.weights(again.model), toys.weights(first.model))
    assert (done.global_step, done.training_loss) == (steps, 0.0)
    assert done.metrics["train_runtime"] >= 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs that died by SIGKILL, by what they were doing."""
    root = tmp_path_factory.mktemp("killed")
    random_step = int.from_bytes(os.urandom(1), "little") % (STEPS - 2) + 2
    jobs: dict[str, dict[str, Any]] = {"step": {"die_at_step": random_step}}
    jobs |= {part: {"die_at_step": 5, "die_in": part} for part in KILLS}
    codes = toys.run_jobs([job | {"output_dir": str(root / name)} for name, job in jobs.items()])
    assert codes == [[-signal.SIGKILL.value]] * len(jobs)
    print("killed at step", random_step)
    return {name: root / name for name in jobs}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", *KILLS])
def test_a_run_killed_at_any_moment_resumes_bit_for_bit(
    whole_run: tuple[Path, Outcome], killed_runs: dict[str, Path], name: str
) -> None:
    _, whole = whole_run
    output_dir = killed_runs[name]
    if name != "step":
        broken = output_dir / "checkpoint-6"
        assert broken.is_dir()
        assert checkpoints.what_is_missing(broken) is not None
        with pytest.raises(ValueError, match=r"Cannot resume from .*checkpoint-6.*checkpoint-5"):
            toys.resumable_trainer(output_dir).train(resume_from_checkpoint=str(broken))
    assert_same(resume(output_dir), whole)
    assert checkpoints.what_is_missing(output_dir / f"checkpoint-{STEPS}") is None


def test_a_loss_that_is_nan_stops_the_run_before_it_can_spoil_anything(
    whole_run: tuple[Path, Outcome], tmp_path: Path
) -> None:
    trainer = toys.resumable_trainer(tmp_path)
    head = trainer.model.lm_head.weight
    trainer.add_callback(toys.OnStep(4, lambda: head.data.fill_(torch.nan)))
    with pytest.raises(ValueError, match=r"loss of step 4, micro-batch 0 is nan.*checkpoint-4.*Lower the learning"):
        trainer.train()
    assert_same(resume(tmp_path), whole_run[1])


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "newest"])
def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path, by_name: bool) -> None:
    args = TrainingArguments(str(tmp_path), **toys.QUIET, max_steps=1, save_steps=1)
    Trainer(toys.tiny_model(), args, train_dataset=toys.sequences(8)).train()
    message = "initial_states_0.safetensors is missing.*from_pretrained" if by_name else "no complete checkpoint"
    with pytest.raises(ValueError, match=message):
        resume(tmp_path, str(tmp_path / "checkpoint-1") if by_name else True)
