"""What a script overrides or replaces around a run: each step has the states of the stock trainer, or says why not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)
from tests.trainers import toys

PROBE = 1000


class OwnStep(TbttTrainer):
    """Trainer's step, written again."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class MovedInputs(TbttTrainer):
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **keyword: Any) -> Tensor:
        return super().training_step(model, {name: part.to("cpu") for name, part in inputs.items()}, *args, **keyword)


class Probe(TrainerCallback):
    """A loader of its own and the loss of other rows between steps, in training mode."""

    trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        next(iter(self.trainer.get_train_dataloader()))
        other = {name: torch.full((1, 3), PROBE) for name in ("input_ids", "labels")}
        with torch.no_grad():
            self.trainer.compute_loss(self.trainer.model, other)


def tbtt(folder: Path, kind: type[TbttTrainer] = TbttTrainer, **other: Any) -> Any:
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "learning_rate": 0.0, "save_strategy": "no"}
    args = TbttConfig(str(folder), **toys.QUIET | settings, max_steps=5, gradient_accumulation_steps=3)
    data = toys.chunks(15, length=3, chunks_before_reset=2)
    return kind(toys.SumModel(), args, train_dataset=data, **other)


def states(trainer: Any) -> list[Any]:
    """Rows and the states before them."""
    trainer.train()
    return [seen for seen in trainer.model.seen if seen[1][0][0] != PROBE]


@pytest.mark.parametrize("kind", [OwnStep, MovedInputs, TbttTrainer])
def test_own_steps_and_looks_at_other_rows_leave_the_states(kind: type[TbttTrainer], tmp_path: Path) -> None:
    trainer = tbtt(tmp_path, kind)
    if kind is TbttTrainer:
        probe = Probe()
        probe.trainer = trainer
        trainer.add_callback(probe)
    assert states(trainer) == states(tbtt(tmp_path))


def test_a_collator_that_drops_where_sequences_begin_is_refused(tmp_path: Path) -> None:
    def own(items: list[Any]) -> dict[str, Tensor]:
        return {name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")}

    with pytest.raises(ValueError, match=r"no state_resets, .* got \['input_ids', 'labels'\]: let data_collator keep"):
        tbtt(tmp_path, data_collator=own).train()


@pytest.mark.parametrize(("constructed", "changed"), [(0.0, 1.0), (1.0, 0.0)])
def test_settings_may_change_before_a_run(tmp_path: Path, constructed: float, changed: float) -> None:
    settings: dict[str, Any] = toys.QUIET | {"max_steps": 4, "per_device_train_batch_size": 2}
    args = StatePassingConfig(str(tmp_path), state_drop_probability=constructed, **settings)
    trainer = StatePassingTrainer(toys.SumModel(), args, train_dataset=toys.sequences(8))
    trainer.args.state_drop_probability = changed
    trainer.train()
    assert any(any(start) for _, _, start, _ in trainer.model.seen) == (changed == 0)


def test_data_may_be_set_before_a_run(tmp_path: Path) -> None:
    chunks = toys.chunks(6, length=3, chunks_before_reset=None)
    seen = []
    for first, then in ((chunks, chunks), (None, chunks), (toys.sequences(6), chunks)):
        settings: dict[str, Any] = toys.QUIET | {"max_steps": 4, "per_device_train_batch_size": 1}
        args = TbttConfig(str(tmp_path), bptt_chunk_length=4, learning_rate=0.0, **settings)
        trainer = TbttTrainer(toys.tiny_model(), args, train_dataset=first)
        trainer.train_dataset = then
        trainer.train()
        seen.append(type(trainer.initial_states).__name__)
    assert seen == ["PassedStates"] * 3


def test_a_loader_of_ones_own_without_a_length_is_read_again(tmp_path: Path) -> None:
    class Own(ZeroStateTrainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(toys.Stream(toys.sequences(8)), batch_size=2))

    args = InitialStateConfig(str(tmp_path), **toys.QUIET, max_steps=7)
    trainer = Own(toys.tiny_model(), args, train_dataset=toys.sequences(8))
    trainer.train()
    assert trainer.state.global_step == 7


@pytest.mark.parametrize("make", [lambda: None, lambda: toys.Stream(toys.sequences(4))], ids=["none", "stream"])
def test_a_model_is_saved_whatever_data_trained_it(tmp_path: Path, make: Callable[[], Any]) -> None:
    model = toys.tiny_model()
    model.save_pretrained(tmp_path / "start")
    args = InitialStateConfig(str(tmp_path / "out"), **toys.QUIET, max_steps=2, per_device_train_batch_size=2)
    trainer = ZeroStateTrainer(str(tmp_path / "start"), args, train_dataset=toys.sequences(4))
    trainer.model.config.training_length = None
    trainer.train()
    trainer.train_dataset = make()
    trainer.save_model()
    assert (tmp_path / "out" / "lineage.json").is_file()
