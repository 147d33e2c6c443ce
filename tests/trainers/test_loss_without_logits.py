"""Trainers let models compute the loss in chunks of tokens where nothing reads logits; what is trained is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EvalPrediction, Trainer

from hf_recurrent_lengthgen.models import modeling_loss
from hf_recurrent_lengthgen.trainers import StatePassingTrainer, ZeroStateTrainer, combine
from tests.trainers import toys

SETTINGS = toys.QUIET | {
    "save_strategy": "no",
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
}
METHODS = ["state passing", "zero state", "random noise", "tbtt", "tbtt on examples"]


@pytest.fixture(autouse=True)
def _fives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_loss, "LOGITS_PER_CHUNK", 5 * toys.VOCABULARY)


def watched(trainer: Any) -> list[bool]:
    """Whether each call of the model for a loss returned logits, from now on."""
    calls: list[bool] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if "logits_to_keep" not in kwargs:  # a window without targets, which has one
            calls.append(output.logits is not None)

    trainer.model.register_forward_hook(look, with_kwargs=True)
    return calls


def trained(out: Path, method: str = "state passing", needs_logits: bool = False, **fields: Any) -> tuple[Any, Any]:
    chosen = toys.METHODS[method]
    model = fields.pop("model", None) or toys.tiny_model()
    args = chosen.config(str(out), **SETTINGS | chosen.settings | fields)
    trainer = chosen.trainer(model, args, train_dataset=chosen.data(24), eval_dataset=toys.sequences(5, seed=3))
    trainer.needs_logits = needs_logits
    calls = watched(trainer)
    trainer.train()
    assert calls == [needs_logits] * len(calls)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("method", METHODS)
def test_the_same_weights_are_trained_without_logits(tmp_path: Path, method: str) -> None:
    chunked, losses = trained(tmp_path / "chunks", method)
    whole, expected = trained(tmp_path / "whole", method, needs_logits=True)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    for name, weight in whole.model.named_parameters():
        torch.testing.assert_close(chunked.model.get_parameter(name), weight, rtol=1e-3, atol=1e-5)
    assert chunked.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-5)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, _ = trained(tmp_path / "run", **saving)
    chosen = toys.METHODS["state passing"]
    args = chosen.config(str(tmp_path / "run"), **SETTINGS | chosen.settings | saving)
    resumed = chosen.trainer(toys.tiny_model(seed=5), args, train_dataset=chosen.data(24))
    resumed.train(str(tmp_path / "run" / "checkpoint-2"))
    toys.assert_same_weights(toys.weights(resumed.model), toys.weights(whole.model))


class Reading(Trainer):
    """Its loss reads logits."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0 * output.logits.sum()
        return (loss, output) if return_outputs else loss


class ReadingMethod(StatePassingTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, output = super().compute_loss(model, inputs, True, kwargs.get("num_items_in_batch"))
        return loss + 0 * output.logits.sum()


class ReadingMixin:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keyword: Any) -> Any:
        loss, output = super().compute_loss(model, inputs, True, **keyword)  # type: ignore[misc]
        loss = loss + 0 * output.logits.sum()
        return (loss, output) if return_outputs else loss


class MixedMethod(ReadingMixin, StatePassingTrainer):
    pass


class WithoutReading(StatePassingTrainer):
    needs_logits = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_class_says_itself_whether_its_loss_reads_logits() -> None:
    assert not WithoutReading.needs_logits
    assert ReadingMethod.needs_logits
    assert MixedMethod.needs_logits
    assert combine(MixedMethod, Trainer)[0].needs_logits
    assert not combine(StatePassingTrainer, Trainer)[0].needs_logits


def test_the_loss_of_a_mixin_gets_logits_in_evaluation(tmp_path: Path) -> None:
    args = StatePassingTrainer.config_class(str(tmp_path), **SETTINGS)
    trainer = MixedMethod(toys.tiny_model(), args, eval_dataset=toys.sequences(5))
    calls = watched(trainer)
    trainer.evaluate()
    assert calls
    assert all(calls)


def of_logits(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    found: Tensor = output.logits.square().mean()
    return found


@pytest.mark.parametrize("kind", ["compute_loss combined", "compute_loss inherited", "compute_loss_func", "alignment"])
def test_a_loss_of_your_own_gets_logits(tmp_path: Path, kind: str) -> None:
    cls, config = StatePassingTrainer, StatePassingTrainer.config_class
    if kind == "compute_loss combined":
        cls, config = combine(StatePassingTrainer, Reading)
    elif kind == "compute_loss inherited":
        cls = ReadingMethod
    further = {"alignment_alpha": 0.1, "alignment_length": 6, "alignment_max_extra": 1} if kind == "alignment" else {}
    data = [{"input_ids": x["input_ids"], "labels": x["input_ids"]} for x in toys.sequences(24)]
    own = {"compute_loss_func": of_logits} if kind == "compute_loss_func" else {}
    trainer = cls(toys.tiny_model(), config(str(tmp_path), **SETTINGS | further), train_dataset=data, **own)
    calls = watched(trainer)
    trainer.train()
    assert calls
    assert all(calls)


def test_compute_metrics_gets_logits_and_a_loss_alone_none(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)  # type: ignore[union-attr]
        return {}

    args = ZeroStateTrainer.config_class(str(tmp_path), **SETTINGS)
    data = toys.sequences(4)
    trainer = ZeroStateTrainer(toys.tiny_model(), args, eval_dataset=data, train_dataset=data, compute_metrics=metrics)
    calls = watched(trainer)
    with_metrics = trainer.evaluate()["eval_loss"]
    assert shapes == [(4, 9, toys.VOCABULARY)]
    trainer.compute_metrics = None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(with_metrics, rel=1e-5)
    assert calls == [True, False]


def test_a_loss_function_of_the_model_gets_logits(tmp_path: Path) -> None:
    model = toys.tiny_model()
    model.loss_function = lambda logits, **_: logits.square().mean()
    trainer = ZeroStateTrainer(
        model, ZeroStateTrainer.config_class(str(tmp_path), **SETTINGS), train_dataset=toys.sequences(24)
    )
    calls = watched(trainer)
    trainer.train()
    assert all(calls)
