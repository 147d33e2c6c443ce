"""An interrupted run continues bit for bit: after a stop, a signal, a kill or a broken loss; else it is refused."""

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import IntervalStrategy

from hf_recurrent_lengthgen.trainers import StatePassingTrainer
from hf_recurrent_lengthgen.trainers.run.resume import (
    initial_states_file,
    load_initial_states,
    newest_complete_checkpoint,
    save_initial_states,
    saved_run,
    what_is_missing,
)
from tests.trainers import toys
from tests.versions import SINCE_5_23

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


def assert_same(actual: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(actual[:3], expected[:3], rtol=0, atol=0)
    assert actual.log == expected.log


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
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*leave out --resume, or resume_from_checkpoint"):
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
        assert what_is_missing(broken) is not None
        with pytest.raises(ValueError, match=r"Cannot resume from .*checkpoint-6.*checkpoint-5"):
            toys.resumable_trainer(output_dir).train(resume_from_checkpoint=str(broken))
    assert_same(resume(output_dir), whole)
    assert what_is_missing(output_dir / f"checkpoint-{STEPS}") is None


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


# --- SIGINT and SIGTERM end a run after the current step, with a checkpoint ---


@pytest.fixture
def handlers() -> Iterator[None]:
    """Python's own handlers, whatever runs the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


python_handlers = pytest.mark.usefixtures("handlers")


def interrupted(output_dir: Path, step: int, *numbers: int, **changes: Any) -> StatePassingTrainer:
    """A trainer that is sent signals when a step begins."""

    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    trainer = toys.resumable_trainer(output_dir, **changes)
    trainer.add_callback(toys.OnStep(step, send))
    return trainer


@python_handlers
@pytest.mark.thinned(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    whole_run: tuple[Path, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
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
    printed = capsys.readouterr().out
    assert "finishing this step and writing a checkpoint. Interrupt again to stop at once." in printed
    assert f"Interrupted after step {step + 1}." in printed
    assert f"{tmp_path / f'checkpoint-{step + 1}'}: train(resume_from_checkpoint=True) continues from it" in printed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert_same(resume(tmp_path, save_strategy="no"), whole_run[1])


@python_handlers
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = interrupted(tmp_path, 3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 3
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert "Interrupted after step 3." in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@python_handlers
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


@python_handlers
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


@python_handlers
@pytest.mark.parametrize("strategy", ["weights alone", "best", "best alone"])
def test_settings_that_would_leave_nothing_to_resume_from_give_way(tmp_path: Path, strategy: str) -> None:
    """The loss falls, and the best checkpoint is that of the highest."""
    measured = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "save_strategy": strategy}
    changes: dict[str, Any] = {
        "weights alone": {"save_only_model": True},
        "best": measured,
        "best alone": measured | {"save_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 1},
    }[strategy]
    trainer = interrupted(tmp_path, 3, signal.SIGINT)
    trainer.eval_dataset = toys.sequences(2)
    for name, value in ({"eval_strategy": "steps", "eval_steps": 1} | changes).items():
        setattr(trainer.args, name, value)
    configured = trainer.args.save_strategy, trainer.args.save_total_limit
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert newest_complete_checkpoint(tmp_path) == tmp_path / f"checkpoint-{trainer.state.global_step}"
    assert (trainer.args.save_strategy, trainer.args.save_total_limit) == configured


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"alignment_alpha": 0.5}, "alignment_alpha was 0.0 and is 0.5"),
        ({"train_sampling_strategy": "group_by_length", "assume_shuffled": True}, "train_dataset.order was None"),
    ],
)
def test_what_an_older_checkpoint_does_not_name_had_its_default(
    whole_run: tuple[Path, Outcome], tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    folder = shutil.copytree(whole_run[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    file = initial_states_file(folder, 0)
    run = saved_run(file)
    run["arguments"] |= changes
    for place, name in ((run, "train_dataset.order"), (run["arguments"], "alignment_alpha")):
        place.pop(name, None)
    save_initial_states(file, load_file(file), run)
    with pytest.raises(ValueError, match=difference):
        resume(tmp_path / "on", str(folder), **changes)


# --- what a resume may change ---

MAY_CHANGE: dict[str, Any] = {
    **{"logging_steps": 3, "per_device_eval_batch_size": 3, "save_steps": 2, "run_name": "b"},
    **{"dataloader_pin_memory": False, "torch_empty_cache_steps": 1, "ddp_timeout": 60, "save_total_limit": 1},
}
FIXED = [
    ({"learning_rate": 0.01}, "learning_rate was 0.05 and is 0.01"),
    ({"warmup_steps": 2}, "warmup_steps was 0 and is 2"),
    ({"lr_scheduler_type": "linear"}, "lr_scheduler_type was 'cosine' and is 'linear'"),
    ({"optim": "sgd"}, "optim was 'adamw_torch_fused' and is 'sgd'"),
    ({"seed": 4}, "seed was 3 and is 4"),
    ({"batch_size": 3}, "per_device_train_batch_size was 2 and is 3"),
    ({"state_drop_probability": 0.7}, "state_drop_probability was 0.3 and is 0.7"),
    (
        {"train_sampling_strategy": "group_by_length", "assume_shuffled": True},
        "train_sampling_strategy was .random. and is",
    ),
    ({"rows": 14}, "train_dataset.rows was 15 and is 14"),
    ({"method": "zero state"}, "source was 'PassedStates' and is 'ZeroStates'"),
]


@pytest.mark.parametrize(("changes", "difference"), FIXED, ids=[next(iter(changes)) for changes, _ in FIXED])
def test_what_decides_the_training_is_refused(
    whole_run: tuple[Path, Outcome], tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    with pytest.raises(ValueError, match=f"Cannot resume exactly from .*checkpoint-3: .*{difference}.*Restore"):
        resume(tmp_path, str(whole_run[0] / "checkpoint-3"), **changes)


def test_what_has_no_part_in_the_training_may_change(whole_run: tuple[Path, Outcome], tmp_path: Path) -> None:
    on = resume(tmp_path, str(whole_run[0] / "checkpoint-3"), **MAY_CHANGE)
    torch.testing.assert_close(on[:3], whole_run[1][:3], rtol=0, atol=0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({}, "max_grad_norm", [(0, 1.0)]),
        ({"max_grad_norm": 0.5}, "max_grad_norm", [(0, 1.0), (3, 0.5)]),
        ({"bf16": True}, "precision", [(0, "float32"), (3, "bfloat16")]),
        ({"num_train_epochs": 3}, "max_steps", [(0, 8), (3, 12)]),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha", [(0, None), (3, 5.0)]),
    ],
)
def test_what_changes_from_a_step_on_is_recorded(
    whole_run: tuple[Path, Outcome], tmp_path: Path, changes: dict[str, Any], name: str, expected: list[Any]
) -> None:
    trainer = toys.resumable_trainer(tmp_path, **changes)
    trainer.train(str(whole_run[0] / "checkpoint-3"))
    assert [(part.from_step, getattr(part, name)) for part in trainer.run_record.settings(trainer)] == expected


def one_cycle(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Any], Any]:
    def own(parameters: Any) -> Any:
        optimizer = kind(parameters, lr=0.01, **settings)  # type: ignore[call-arg]
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)

    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "recorded"),
    [
        (one_cycle(torch.optim.AdamW), ("adamw_torch_fused", (0.95, 0.999), None, "OneCycleLR")),
        (one_cycle(torch.optim.SGD, momentum=0.9), ("SGD", None, 0.95, "OneCycleLR")),
    ],
    ids=["betas", "momentum"],
)
def test_what_a_schedule_moves_goes_on_and_is_recorded_as_it_began(
    tmp_path: Path, own: Callable[[Any], Any], recorded: tuple[Any, ...]
) -> None:
    runs = []
    for folder in ("whole", "resumed"):
        trainer = toys.resumable_trainer(tmp_path / folder)
        optimizers = own(trainer.model.parameters())
        trainer = StatePassingTrainer(
            trainer.model, trainer.args, train_dataset=trainer.train_dataset, optimizers=optimizers
        )
        trainer.train(str(tmp_path / "whole" / "checkpoint-3") if runs else None)
        runs.append(trainer)
    assert_same(outcome(runs[1]), outcome(runs[0]))
    (settings,) = runs[1].run_record.settings(runs[1])
    assert (settings.optim, settings.betas, settings.momentum, settings.lr_scheduler_type) == recorded


# --- checkpoint folders ---

RUN: dict[str, str | int] = {"source": "PassedStates", "num_processes": 1, "per_device_train_batch_size": 2}
TENSORS = {"micro_batches.0.layers.0.recurrent": torch.tensor([[1.5, -2.0]])}


def make_checkpoint(output_dir: Path, step: int, processes: int = 1) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for index in range(processes):
        save_initial_states(initial_states_file(folder, index), TENSORS, RUN | {"num_processes": processes})
        torch.save({}, folder / ("rng_state.pth" if processes == 1 else f"rng_state_{index}.pth"))
    torch.save({}, folder / "optimizer.pt")
    torch.save({}, folder / "scheduler.pt")
    save_file(TENSORS, folder / "model.safetensors")
    TrainerState(global_step=step).save_to_json(str(folder / "trainer_state.json"))
    return folder


def test_a_file_of_states_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    save_initial_states(path, TENSORS, RUN)
    torch.testing.assert_close(load_initial_states(path, RUN), TENSORS, rtol=0, atol=0)
    assert saved_run(path) == RUN
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _newer(path: Path) -> None:
    save_file(TENSORS, path, {"format": "initial_states", "format_version": "2"})


BROKEN: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (lambda path: path.unlink(), {}, "is missing, so this run cannot be resumed exactly"),
    (_truncate, {}, r"is damaged .*resume from an earlier checkpoint"),
    (_newer, {}, r"has format .* version .*, this code reads 'initial_states' up to"),
    (lambda path: save_file(TENSORS, path), {}, r"has format None"),
    (lambda path: None, {"num_processes": 2}, r"num_processes was 1 and is 2\. Restore the old value, or start a new"),
]


@pytest.mark.parametrize(("damage", "now", "message"), BROKEN, ids=["missing", "cut off", "newer", "other", "changed"])
def test_a_file_of_states_that_does_not_fit_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], now: dict[str, Any], message: str
) -> None:
    path = tmp_path / "states.safetensors"
    save_initial_states(path, TENSORS, RUN)
    damage(path)
    with pytest.raises(ValueError, match=message):
        load_initial_states(path, RUN | now)


ALWAYS = ["trainer_state.json", "initial_states_0.safetensors", "optimizer.pt", "scheduler.pt"]
NEEDED = {1: [*ALWAYS, "rng_state.pth"], 2: [*ALWAYS, "initial_states_1.safetensors", "rng_state_1.pth"]}


@pytest.mark.parametrize(("processes", "name"), [(n, name) for n, names in NEEDED.items() for name in names])
def test_every_missing_file_is_named(tmp_path: Path, processes: int, name: str) -> None:
    folder = make_checkpoint(tmp_path, 5, processes)
    assert what_is_missing(folder) is None
    (folder / name).unlink()
    assert name in str(what_is_missing(folder))


@pytest.mark.parametrize("text", ["", '{"epoch": 1.0,', "[]", '{"unknown_field": 1}', "\x00\x00"])
def test_an_unreadable_trainer_state_is_an_interrupted_save(tmp_path: Path, text: str) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (folder / "trainer_state.json").write_text(text)
    assert "trainer_state.json cannot be read" in str(what_is_missing(folder))


def test_the_newest_complete_checkpoint_counts_steps_not_letters_or_times(tmp_path: Path) -> None:
    assert newest_complete_checkpoint(tmp_path / "nowhere") is None
    for step in (10, 9, 11, 2):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-11" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-13").touch()
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
