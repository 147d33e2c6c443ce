"""Metrics during training: what is logged, and that training does not notice."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment, long_short_misalignment
from hf_recurrent_lengthgen.metrics.remembrance.measure import effective_remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt
from hf_recurrent_lengthgen.trainers import (
    Metric,
    MetricCallback,
    StatePassingConfig,
    StatePassingTrainer,
    context_harm,
    effective_remembrance_at,
    length_evaluation,
    misalignment,
)
from hf_recurrent_lengthgen.trainers.metric_callbacks import numbers_of
from tests.trainers import toys

TOKENS = np.random.default_rng(0).integers(3, 17, (3, 65))


def disturbing(model: nn.Module) -> float:
    """A metric that asserts how it is called, and leaves as much changed as it can."""
    assert not any(module.training for module in model.modules())
    assert not torch.is_grad_enabled()
    model.train()
    return float(torch.rand(())) + random.random() + float(np.random.rand())


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("method", "bf16"), [("state passing", False), ("state passing", True), ("random noise", False)]
)
def test_training_is_bit_for_bit_that_without_metrics(tmp_path: Path, method: str, bf16: bool) -> None:
    logs, weights = [], []
    for name in ("without", "with"):
        trainer = toys.resumable_trainer(tmp_path / name, method=method, save_strategy="no", bf16=bf16)
        trainer.model.backbone.layers[0].register_forward_hook(  # a model whose steps depend on random numbers
            lambda module, _, output: (output[0] * (1 + 0.1 * torch.rand(()) * module.training), *output[1:])
        )
        if name == "with":
            MetricCallback([Metric("noise", disturbing), context_harm(TOKENS, 16)], every_steps=1).attach(trainer)
        trainer.train()
        weights.append(toys.weights(trainer.model))
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    toys.assert_same_weights(*weights)
    assert len(logs[0]) == 8
    assert logs[0] == logs[1]
    assert weights[0].keys()
    assert trainer.model.training


@pytest.mark.thinned(2)
@pytest.mark.parametrize("broken", [False, True])
def test_metrics_see_the_weights_in_their_dtype(tmp_path: Path, broken: bool) -> None:
    ids = torch.from_numpy(TOKENS)
    seen = []

    def metric(model: nn.Module) -> float:
        alone = toys.tiny_model().eval()
        alone.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(input_ids=ids).logits, alone(input_ids=ids).logits, rtol=0, atol=0)
        seen.append(alone)
        return 1 / (0 if broken else 1)

    trainer = toys.resumable_trainer(tmp_path, save_strategy="no", bf16=True, max_steps=1)
    MetricCallback({"one": metric}, every_steps=1, at_start=False).attach(trainer)
    if broken:
        with pytest.raises(RuntimeError, match="'one' failed at step 1"):
            trainer.train()
    else:
        trainer.train()
    assert len(seen) == 1
    # training itself is in bfloat16, and stays so
    training = trainer.model.eval()(input_ids=ids).logits
    assert not torch.equal(training, seen[0](input_ids=ids).logits)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(training, seen[0](input_ids=ids).logits.float(), rtol=0, atol=0)


class Tracker(TrainerCallback):
    """Keeps what a tracker gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.got.append((state.global_step, dict(logs)))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 3, 6, 8]),
        ({"at_start": False}, [3, 6, 8]),
        ({"at_end": False}, [0, 3, 6]),
        ({"every_steps": 4}, [0, 4, 8]),
    ],
    ids=str,
)
def test_values_are_logged_at_the_requested_steps(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no", logging_steps=3)
    tracker = Tracker()
    trainer.add_callback(tracker)
    metrics = {"one": lambda model: torch.tensor(1.5), "two": lambda model: {"a": 1, "b": Estimate(2.0, 1.0, None)}}
    MetricCallback(metrics, **{"every_steps": 3} | options).attach(trainer)
    trainer.train()
    found = [entry for entry in trainer.state.log_history if "eval_one" in entry]
    assert [entry["step"] for entry in found] == steps
    expected = {"eval_one": 1.5, "eval_two_a": 1.0, "eval_two_b": 2.0, "eval_two_b_low": 1.0}
    assert all(entry.items() >= expected.items() for entry in found)
    assert [(step, logs["eval_two_a"]) for step, logs in tracker.got if "eval_two_a" in logs] == [
        (s, 1.0) for s in steps
    ]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [3, 6]


@pytest.mark.slow
def test_ready_made_metrics_are_those_of_evaluation(tmp_path: Path) -> None:
    model, T = toys.tiny_model(), 16
    args = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", **toys.QUIET)
    trainer = Trainer(model, args, train_dataset=toys.sequences(8))
    whole = evaluate_model(model, TOKENS, T, settings=EvaluationSettings(progress=False))
    remembrance = effective_remembrance(model, TOKENS, T, EvaluationSettings(progress=False)).beyond_training
    moved = long_short_misalignment(model, TOKENS, T, progress=False)
    metrics = [f(TOKENS, T) for f in (context_harm, effective_remembrance_at, misalignment)]
    MetricCallback(metrics, every_steps=5, at_end=False).attach(trainer)
    trainer.train()
    found = trainer.state.log_history[0]
    assert remembrance is not None
    for name, estimate in (
        ("eval_context_harm", whole.harm.last),
        ("eval_remembrance_48", remembrance),
        ("eval_misalignment", Estimate(moved.mean, moved.low, moved.high)),
    ):
        bounds = [found[name], found[f"{name}_low"], found[f"{name}_high"]]
        np.testing.assert_allclose(bounds, [estimate.mean, estimate.low, estimate.high], rtol=1e-5, atol=1e-7)


def broken(model: nn.Module) -> float:
    raise KeyError("gone")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (broken, RuntimeError, "The metric 'm' failed at step 0: KeyError: 'gone'"),
        (lambda model: "text", ValueError, "'m' failed at step 0: .*got str"),
        (lambda model: {}, ValueError, "'m' failed at step 0: .*it returned no number"),
        (
            context_harm(TOKENS[:, :10], 16).function,
            ValueError,
            "'m' failed at step 0: .*training length 16, got shape",
        ),
    ],
    ids=["error", "text", "nothing", "short tokens"],
)
def test_a_failing_metric_is_named(tmp_path: Path, metric: Any, error: type, message: str) -> None:
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no")
    MetricCallback({"fine": lambda model: 1.0, "m": metric}, every_steps=2).attach(trainer)
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.model.training


def test_names_that_meet_are_refused(tmp_path: Path) -> None:
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no")
    MetricCallback({"a": lambda model: {"b": 1.0}, "a_b": lambda model: 2.0}, every_steps=2).attach(trainer)
    with pytest.raises(ValueError, match=r"'a_b' failed at step 0: .*names of another metric"):
        trainer.train()


def test_unusable_settings_are_refused(tmp_path: Path) -> None:
    fine = {"a": lambda model: 1.0}
    with pytest.raises(ValueError, match=r"at least one metric, with different names, got \[\]"):
        MetricCallback([], every_steps=1)
    with pytest.raises(ValueError, match=r"different names, got \['misalignment', 'misalignment'\]"):
        MetricCallback([misalignment(TOKENS, 8), misalignment(TOKENS, 16)], every_steps=1)
    trainer = toys.resumable_trainer(tmp_path / "a", save_strategy="no")
    callback = MetricCallback(fine, every_steps=1).attach(trainer)
    with pytest.raises(ValueError, match="attached to a trainer already"):
        callback.attach(trainer)
    loose = toys.resumable_trainer(tmp_path / "b", save_strategy="no")
    loose.add_callback(MetricCallback(fine, every_steps=1))
    with pytest.raises(ValueError, match=r"attach\(trainer\) instead of giving"):
        loose.train()
    other = toys.resumable_trainer(tmp_path / "c", save_strategy="no")
    other.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="under FSDP or DeepSpeed holds only a part of it"):
        MetricCallback(fine, every_steps=1).attach(other)


def test_typed_results_give_their_numbers() -> None:
    assert numbers_of("m", Misalignment(2.0, 1.0, None, (0.0,))) == {"m": 2.0, "m_low": 1.0}
    prompt = ConstantPrompt(13, 16, 64, Curve((0, 16, 64), (1.0, 5.0), None, None), 1.0, 5.0, 2.0, None)
    found = numbers_of("m", prompt)
    assert (found["m_inside"], found["m_beyond"]) == (1.0, 5.0)
    assert not {"m_curve", "m_exceeded_from"} & found.keys()
    assert numbers_of("m", Estimate(1.0, None, None)) == {"m": 1.0}
    assert numbers_of("m", np.float32(2)) == {"m": 2.0}
    with pytest.raises(ValueError, match="got list"):
        numbers_of("m", [1.0, 2.0])


def evaluating(folder: Path, own: bool, callback: Any, **changes: Any) -> Trainer:
    """A run of four steps that is evaluated after each; `own` is of this package and gets its callback by the list."""
    settings = toys.QUIET | {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1} | changes
    data = {"train_dataset": toys.sequences(16), "eval_dataset": toys.sequences(4)}
    if own:
        arguments = StatePassingConfig(str(folder), **settings)
        return StatePassingTrainer(toys.tiny_model(), arguments, **data, callbacks=[callback])
    trainer = Trainer(toys.tiny_model(), TrainingArguments(str(folder), **settings), **data)
    callback.attach(trainer)
    return trainer


class Falling:
    """A harm that is least when it is measured for the second time."""

    def __init__(self) -> None:
        self.values = [3.0, 1.0, 2.0, 4.0, 5.0, 6.0]
        self.weights: list[dict[str, torch.Tensor]] = []

    def __call__(self, model: nn.Module) -> float:
        self.weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
        return self.values[len(self.weights) - 1]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("own", [True, False])
def test_the_best_model_is_that_of_a_metric(tmp_path: Path, own: bool) -> None:
    harm = Falling()
    callback = MetricCallback([Metric("context_harm", harm, greater_is_better=False)], every_steps=2, at_start=False)
    best = {"metric_for_best_model": "context_harm", "load_best_model_at_end": True, "greater_is_better": False}
    trainer = evaluating(tmp_path, own, callback, **best)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_metric == 1.0
    assert len(harm.weights) == 4  # once for each step, also where two things ask for it
    toys.assert_same_weights(toys.weights(trainer.model), harm.weights[1])
    logged = [entry["eval_context_harm"] for entry in trainer.state.log_history if "eval_context_harm" in entry]
    assert logged == [3.0, 1.0, 2.0, 4.0]
    found = trainer.evaluate()
    assert found["eval_context_harm"] == 5.0
    assert found["eval_loss"] > 0
    toys.assert_same_weights(harm.weights[4], harm.weights[1])


class StopAfter(TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def test_the_best_weights_are_not_measured_as_those_of_the_last_step(tmp_path: Path) -> None:
    callback = MetricCallback([Metric("context_harm", Falling(), greater_is_better=False)], at_start=False)
    best = {"metric_for_best_model": "context_harm", "load_best_model_at_end": True, "greater_is_better": False}
    trainer = evaluating(tmp_path, True, callback, **best, eval_steps=2, save_steps=2, max_steps=6)
    trainer.add_callback(StopAfter(5))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_context_harm" in entry]
    assert [(entry["step"], entry["eval_context_harm"]) for entry in logged] == [(2, 3.0), (4, 1.0)]
    assert (trainer.state.best_global_step, trainer.state.global_step) == (4, 5)


@pytest.mark.parametrize("named", ["context_harm", "eval_context_harm_high", "length_harm"])
def test_the_worst_is_not_kept_as_the_best(tmp_path: Path, named: str) -> None:
    metrics = [context_harm(TOKENS, 16), length_evaluation(TOKENS, 16)]
    callback = MetricCallback(metrics, every_steps=2)
    best = {"metric_for_best_model": named, "load_best_model_at_end": True}
    with pytest.raises(ValueError, match=r"best value of .* is the lowest.*set greater_is_better=False"):
        evaluating(tmp_path, True, callback, **best)
