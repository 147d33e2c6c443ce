"""SIGINT and SIGTERM end a run after the current step, with a checkpoint that continues bit for bit."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_recurrent_lengthgen.trainers import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.run.resume import newest_complete_checkpoint
from tests.trainers import toys
from tests.versions import SINCE_5_23

STEPS = 8  # of toys.resumable_trainer


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's own handlers, whatever runs the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> InitialStateTrainer:
    """A run that nothing interrupts."""
    trainer: InitialStateTrainer = toys.resumable_trainer(tmp_path_factory.mktemp("whole"), save_strategy="no")
    trainer.train()
    return trainer


def interrupted(output_dir: Path, step: int, *numbers: int, **changes: Any) -> InitialStateTrainer:
    """A trainer that is sent signals when a step begins."""

    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    trainer: InitialStateTrainer = toys.resumable_trainer(output_dir, **changes)
    trainer.add_callback(toys.OnStep(step, send))
    return trainer


@pytest.mark.thinned(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    whole: InitialStateTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    step = random.randrange(STEPS - 1)
    print("interrupted in step", step)
    trainer = interrupted(tmp_path, step, number, save_strategy="no")
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as ended:
        trainer.train()
    if number == signal.SIGTERM:
        assert ended.value.code == 143  # 128 + 15, as a shell says it
    assert trainer.state.global_step == step + 1
    assert [folder.name for folder in tmp_path.iterdir()] == [f"checkpoint-{step + 1}"]
    told = capsys.readouterr().out
    assert "finishing this step and writing a checkpoint. Interrupt again to stop at once." in told
    assert f"Interrupted after step {step + 1}." in told
    assert f"{tmp_path / f'checkpoint-{step + 1}'}: train(resume_from_checkpoint=True) continues from it" in told
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    resumed = toys.resumable_trainer(tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    toys.assert_same_weights(toys.weights(resumed.model), toys.weights(whole.model))
    torch.testing.assert_close(resumed.initial_states.state_dict(), whole.initial_states.state_dict(), rtol=0, atol=0)
    moments = [
        [value for state in trainer.optimizer.state.values() for value in state.values()]
        for trainer in (resumed, whole)
    ]
    torch.testing.assert_close(*moments, rtol=0, atol=0)


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = interrupted(tmp_path, 3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 3
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert "Interrupted after step 3." in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_training_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no", max_steps=2)
    seen: list[Any] = []
    trainer.add_callback(toys.OnStep(1, lambda: seen.append(signal.getsignal(signal.SIGINT))))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 2
    assert seen == [signal.default_int_handler]


@pytest.mark.slow
@pytest.mark.skipif(not SINCE_5_23, reason="two processes cannot resume, see test_methods.py")
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(tmp_path: Path) -> None:
    run = {"rows": 24, "processes": 2, "max_steps": 4, "save_steps": 4}
    folder = {"output_dir": str(tmp_path / "run")}
    interrupted = {"interrupt_at_step": 1, "die_in_process": 1, "number": signal.SIGTERM.value}
    jobs = [run | folder | interrupted, run | folder | {"resume": True}, run | {"output_dir": str(tmp_path / "whole")}]
    assert toys.run_jobs(jobs)[1:] == [[0, 0], [0, 0]]
    assert sorted(folder.name for folder in (tmp_path / "run").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    for name in ("model.safetensors", "initial_states_0.safetensors", "initial_states_1.safetensors"):
        resumed, whole = (load_file(tmp_path / run / "checkpoint-4" / name) for run in ("run", "whole"))
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_a_signal_in_an_evaluation_stops_right_after_it(tmp_path: Path) -> None:
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no")
    trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 1
    trainer.eval_dataset = toys.sequences(2)
    trainer.add_callback(SignalInEvaluation())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 3
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").is_file()


class SignalInEvaluation(TrainerCallback):
    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_weights_alone_would_leave_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, 3, signal.SIGINT, save_only_model=True).train()
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
