"""Settings that change at a resume apply from there on, are said, and stand in the lineage; else they are refused."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hf_recurrent_lengthgen.checkpoints.methods import PLAIN
from hf_recurrent_lengthgen.checkpoints.records import Settings, read_lineage
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from tests.trainers import toys

FIRST: dict[str, Any] = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 3}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    toys.tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """After two steps of three."""
    folder = tmp_path_factory.mktemp("first")
    make(base, folder, save_steps=2).train()
    return str(folder / "checkpoint-2")


def make(base: Path, folder: Path, own: Callable[[Any], Any] | None = None, **changes: Any) -> StatePassingTrainer:
    """With an optimizer and schedule that `own` makes of the parameters."""
    settings = toys.QUIET | FIRST | {"save_strategy": "steps", "save_steps": 100, "logging_steps": 1} | changes
    arguments = StatePassingConfig(str(folder), per_device_train_batch_size=2, **settings)
    rows = PackedBlocks(torch.arange(400) % toys.VOCABULARY, length=9)
    model = StatefulMamba2ForCausalLM.from_pretrained(base)
    given = {} if own is None else {"optimizers": own(model.parameters())}
    return StatePassingTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, **given)


def recorded(trainer: StatePassingTrainer) -> tuple[Settings, ...]:
    trainer.save_model()
    lineage = read_lineage(trainer.output_dir)
    assert lineage is not None
    training = lineage.steps[-1].training
    assert training is not None
    assert training.steps == trainer.state.global_step
    return training.settings


def over(parts: tuple[Settings, ...], name: str) -> list[tuple[int, Any]]:
    """A setting by the step from which it applied."""
    return [(part.from_step, getattr(part, name)) for part in parts]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.message for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = transformers_logging.get_logger("hf_recurrent_lengthgen.trainers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.slow
def test_an_unchanged_resume_says_nothing(
    base: Path, checkpoint: str, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    trainer = make(base, tmp_path)
    trainer.train(checkpoint)
    assert "these settings differ" not in said(warned)
    settings = recorded(trainer)
    (only,) = settings
    assert (only.from_step, only.max_steps, only.learning_rate) == (0, 3, 0.01)
    assert (only.optim, only.betas, only.weight_decay) == ("adamw_torch_fused", (0.9, 0.999), 0)


def test_a_new_learning_rate_applies(base: Path, checkpoint: str, tmp_path: Path) -> None:
    before = load_file(Path(checkpoint) / "model.safetensors")
    moved: list[dict[str, Tensor]] = []
    for rate in (0.01, 0.0025):
        trainer = make(base, tmp_path / str(rate), learning_rate=rate)
        trainer.train(checkpoint)
        assert trainer.state.log_history[-2]["learning_rate"] == rate
        after = trainer.model.state_dict()
        moved.append({name: (after[name] - before[name]) / rate for name in before})
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-3)
    assert over(recorded(trainer), "learning_rate") == [(0, 0.01), (2, 0.0025)]


def test_clipping_changes_and_is_said(
    base: Path, checkpoint: str, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    trainer = make(base, tmp_path, max_grad_norm=0.5)
    trainer.train(checkpoint)
    assert over(recorded(trainer), "max_grad_norm") == [(0, None), (2, 0.5)]
    assert "From step 2 on" in said(warned)
    assert "max_grad_norm None -> 0.5" in said(warned)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("changes", "rates", "names"),
    [
        ({"max_steps": 6}, [0.01 * (6 - step) / 6 for step in range(2, 6)], {"max_steps": [3, 6]}),
        ({"warmup_steps": 2, "learning_rate": 0.02}, [0.02], {"warmup_steps": [0, 2], "learning_rate": [0.01, 0.02]}),
        ({"bf16": True}, [0.01 / 3], {"precision": ["float32", "bfloat16"]}),
    ],
    ids=["steps", "warm-up", "precision"],
)
def test_the_schedule_is_that_of_the_arguments_from_the_first_step_on(
    base: Path, tmp_path: Path, changes: dict[str, Any], rates: list[float], names: dict[str, list[Any]]
) -> None:
    make(base, tmp_path / "first", save_steps=2, lr_scheduler_type="linear").train()
    trainer = make(base, tmp_path, **{"lr_scheduler_type": "linear"} | changes)
    trainer.train(str(tmp_path / "first" / "checkpoint-2"))
    log = [entry["learning_rate"] for entry in trainer.state.log_history if entry["step"] > 2 and "loss" in entry]
    assert log == pytest.approx(rates)
    settings = recorded(trainer)
    assert {name: over(settings, name) for name in names} == {
        name: [(0, before), (2, now)] for name, (before, now) in names.items()
    }


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"optim": "sgd"}, "optim was 'adamw_torch_fused' and is 'sgd'"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type was 'constant' and is 'linear'"),
    ],
)
def test_another_optimizer_or_schedule_is_refused_by_name(
    base: Path, checkpoint: str, tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    with pytest.raises(ValueError, match=difference):
        make(base, tmp_path, **changes).train(checkpoint)


@pytest.mark.slow
def test_a_schedule_that_keeps_its_rate_takes_no_other(base: Path, tmp_path: Path) -> None:
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 100}
    first = make(base, tmp_path / "first", save_steps=2, **plateau)
    first.train()
    again = make(base, tmp_path / "again", learning_rate=0.5, **plateau)
    with pytest.raises(ValueError, match="ReduceLROnPlateau keeps its own learning rate"):
        again.train(str(tmp_path / "first" / "checkpoint-2"))
    same = make(base, tmp_path / "same", **plateau)
    same.train(str(tmp_path / "first" / "checkpoint-2"))
    assert same.state.global_step == 3


def test_an_optimizer_of_ones_own_is_recorded_as_it_is(base: Path, tmp_path: Path) -> None:
    trainer = make(base, tmp_path)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = StatePassingTrainer(
        trainer.model, trainer.args, train_dataset=trainer.train_dataset, optimizers=(optimizer, scheduler)
    )
    trainer.train()
    (settings,) = recorded(trainer)
    assert (settings.optim, settings.momentum, settings.weight_decay, settings.betas) == ("SGD", 0.9, 0, None)
    assert (settings.learning_rate, settings.lr_scheduler_type) == (0.3, "StepLR")


def test_another_optimizer_of_ones_own_is_refused(base: Path, tmp_path: Path) -> None:
    def own(kind: Any, **settings: Any) -> Callable[[Any], Any]:
        return lambda parameters: (kind(parameters, lr=0.1, **settings), None)

    make(base, tmp_path, own(torch.optim.AdamW), save_steps=2).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    make(base, tmp_path, own(torch.optim.AdamW)).train(checkpoint)
    with pytest.raises(ValueError, match=r"another optimizer: weight_decay was 0.01 and is 0.5"):
        make(base, tmp_path, own(torch.optim.AdamW, weight_decay=0.5)).train(checkpoint)
    with pytest.raises(ValueError, match=r"another optimizer: optim was adamw_torch_fused and is SGD"):
        make(base, tmp_path, own(torch.optim.SGD)).train(checkpoint)


def one_cycle(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Any], Any]:
    def own(parameters: Any) -> Any:
        optimizer = kind(parameters, lr=0.01, **settings)  # type: ignore[call-arg]
        return optimizer, OneCycleLR(optimizer, max_lr=0.05, total_steps=6)

    return own


def adam_with_constant_rate(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)
    return optimizer, LambdaLR(optimizer, lambda _: 1.0)


class _Annealing(TrainerCallback):
    """Of weight decay, from what it is: each step adds to it."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] += 0.5


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("own", "callbacks", "told"),
    [
        (one_cycle(torch.optim.AdamW), [], ("adamw_torch_fused", (0.95, 0.999), None, 0.01)),
        (one_cycle(torch.optim.SGD, momentum=0.9), [], ("SGD", None, 0.95, 0)),
        (adam_with_constant_rate, [_Annealing], ("adamw_torch_fused", (0.9, 0.999), None, 0)),
    ],
    ids=["betas", "momentum", "callback"],
)
def test_what_moves_during_a_run_goes_on_at_a_resume(
    base: Path,
    tmp_path: Path,
    warned: pytest.LogCaptureFixture,
    own: Callable[[Any], Any],
    callbacks: list[Any],
    told: tuple[Any, ...],
) -> None:
    whole = make(base, tmp_path / "whole", own, max_steps=6, save_steps=3)
    trainer = make(base, tmp_path / "resumed", own, max_steps=6)
    for callback in callbacks:
        whole.add_callback(callback)
        trainer.add_callback(callback)
    whole.train()
    trainer.train(str(tmp_path / "whole" / "checkpoint-3"))
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert "these settings differ" not in said(warned)
    (settings,) = recorded(trainer)
    assert (settings.optim, settings.betas, settings.momentum, settings.weight_decay) == told


@pytest.mark.parametrize("probability", [0.1, 1.0])
def test_a_method_that_gave_no_state_is_not_recorded(base: Path, tmp_path: Path, probability: float) -> None:
    trainer = make(base, tmp_path, state_drop_probability=probability)
    trainer.train()
    trainer.save_model()
    lineage = read_lineage(tmp_path)
    assert lineage is not None
    (step,) = lineage.steps
    assert step.training is not None
    assert step.training.methods == (StatePassingTrainer.about if probability < 1 else PLAIN,)


def test_the_best_weights_are_recorded_as_such(base: Path, tmp_path: Path) -> None:
    changes = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    # the wrong way round, so that the first is the best
    trainer = make(base, tmp_path, **changes, metric_for_best_model="loss", greater_is_better=True)
    trainer.train()
    assert trainer.state.best_global_step == 1
    recorded(trainer)
    lineage = read_lineage(tmp_path)
    assert lineage is not None
    run = lineage.steps[-1].training
    assert run is not None
    assert (run.best_step, run.best_metric) == (1, "loss")
