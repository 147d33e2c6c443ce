"""What a trainer writes of itself when a person saves the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.methods import PLAIN
from hf_recurrent_lengthgen.checkpoints.records import TrainingRun, last_training, read_lineage
from hf_recurrent_lengthgen.data import PackedBlocks, PaddingCollator
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import (
    RandomNoiseConfig,
    RandomNoiseTrainer,
    StatePassingConfig,
    StatePassingTrainer,
)

SIZES = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
QUICK = {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none", "dataloader_pin_memory": False}


def model() -> StatefulMamba2ForCausalLM:
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=20, **SIZES))


def blocks() -> PackedBlocks:
    return PackedBlocks(torch.arange(200) % 20, length=9)


def test_the_lineage_goes_from_model_to_model(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "base")
    start = StatefulMamba2ForCausalLM.from_pretrained(tmp_path / "base")
    arguments = StatePassingConfig(str(tmp_path / "intervention"), save_steps=2, alignment_alpha=0.0, **QUICK)
    trainer = StatePassingTrainer(start, arguments, train_dataset=blocks())
    trainer.save_model(str(tmp_path / "untrained"))
    trainer.train()
    trainer.save_model()
    assert read_lineage(tmp_path / "untrained") is None
    assert read_lineage(tmp_path / "intervention" / "checkpoint-2") is None
    lineage = read_lineage(tmp_path / "intervention")
    assert lineage is not None
    assert lineage.source is not None
    assert (lineage.source.name, lineage.source.format) == ("base", "lengthgen")
    (step,) = lineage.steps
    assert step.training is not None
    assert step.training.methods == (StatePassingTrainer.about,)
    assert step.training.data == DataSource("PackedBlocks of 20 sequences")
    assert (step.training.steps, step.training.tokens) == (3, 3 * 2 * 9)
    record = last_training(lineage)
    assert record is not None
    assert (record.methods, record.state_drop_probability, record.learning_rate) == (("state passing",), 0.1, 5e-05)

    further = StatefulMamba2ForCausalLM.from_pretrained(tmp_path / "intervention")
    noise = RandomNoiseConfig(str(tmp_path / "noise"), noise_sigma=0.1, save_strategy="no", **QUICK)
    second = RandomNoiseTrainer(further, noise, train_dataset=blocks())
    second.data_description = "numbers in order"
    second.train()
    second.save_model()
    longer = read_lineage(tmp_path / "noise")
    assert longer is not None
    assert longer.steps[0] == step
    assert [one.training.methods for one in longer.steps if one.training] == [
        (StatePassingTrainer.about,),
        (RandomNoiseTrainer.about,),
    ]
    assert longer.steps[1].training is not None
    assert longer.steps[1].training.data.name == "numbers in order"


def test_a_model_may_be_named_by_its_folder(tmp_path: Path) -> None:
    Mamba2ForCausalLM(Mamba2Config(vocab_size=20, expand=2, **SIZES)).save_pretrained(tmp_path / "stock")
    folder, weights = str(tmp_path / "stock"), []
    for model in (folder, load_model(folder)):
        arguments = StatePassingConfig(str(tmp_path / "intervention"), save_strategy="no", seed=3, **QUICK)
        trainer = StatePassingTrainer(model, arguments, train_dataset=blocks())
        trainer.train()
        trainer.save_model()
        weights.append(trainer.model.state_dict())
        lineage = read_lineage(tmp_path / "intervention")
        assert lineage is not None
        assert lineage.source is not None
        assert lineage.source.name == "stock"
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(ValueError, match=r"nowhere is no (checkpoint )?folder"):
        StatePassingTrainer(model="nowhere", args=arguments)


def trained_and_recorded(base: Path, folder: Path, own: Any = None, **changes: Any) -> TrainingRun:
    """The record of a training of a saved model; `own` makes optimizer and schedule of its parameters."""
    model().save_pretrained(base)
    start = StatefulMamba2ForCausalLM.from_pretrained(base)
    arguments = StatePassingConfig(str(folder), **QUICK | changes)
    options = {} if own is None else {"optimizers": own(start.parameters())}
    trainer = StatePassingTrainer(start, arguments, train_dataset=blocks(), eval_dataset=blocks(), **options)
    trainer.train()
    trainer.save_model()
    lineage = read_lineage(folder)
    assert lineage is not None
    training = lineage.steps[-1].training
    assert training is not None
    return training


def test_an_optimizer_of_ones_own_is_recorded_as_it_is(tmp_path: Path) -> None:
    def own(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    (settings,) = trained_and_recorded(tmp_path / "base", tmp_path / "run", own).settings
    assert (settings.optim, settings.momentum, settings.weight_decay, settings.betas) == ("SGD", 0.9, 0, None)
    assert (settings.learning_rate, settings.lr_scheduler_type) == (0.3, "StepLR")


@pytest.mark.parametrize("probability", [0.1, 1.0])
def test_a_method_that_gave_no_state_is_not_recorded(tmp_path: Path, probability: float) -> None:
    run = trained_and_recorded(tmp_path / "base", tmp_path / "run", state_drop_probability=probability)
    assert run.methods == (StatePassingTrainer.about if probability < 1 else PLAIN,)


def test_the_best_weights_are_recorded_as_such(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first
    each_step = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.01}
    run = trained_and_recorded(tmp_path / "base", tmp_path / "run", **best, **each_step)
    assert (run.best_step, run.best_metric) == (1, "loss")


@pytest.mark.parametrize("size", [1, 2], ids=["without padding", "padded"])
def test_tokens_of_rows_of_several_lengths_are_counted(size: int, tmp_path: Path) -> None:
    """And not those of a first row of 4, as often as there are rows."""
    model().save_pretrained(tmp_path / "base")
    ids = [torch.arange(length) for length in (4, 20, 9, 15)]
    arguments = StatePassingConfig(
        str(tmp_path / "intervention"),
        num_train_epochs=2,
        save_steps=3,
        use_cpu=True,
        per_device_train_batch_size=size,
    )
    for resume in (False, f"{tmp_path}/intervention/checkpoint-3"):
        trainer = StatePassingTrainer(
            load_model(str(tmp_path / "base")),
            arguments,
            train_dataset=[{"input_ids": each, "labels": each} for each in ids],
            data_collator=PaddingCollator(),
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        lineage = read_lineage(tmp_path / "intervention")
        assert lineage is not None
        (step,) = lineage.steps
        assert step.training is not None
        assert (step.training.tokens, step.training.row_tokens) == (2 * 48, 12)


def test_a_model_of_nowhere_gets_no_lineage(tmp_path: Path) -> None:
    arguments = StatePassingConfig(str(tmp_path), save_strategy="no", **QUICK)
    trainer = StatePassingTrainer(model(), arguments, train_dataset=blocks())
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "config.json").is_file()
    assert read_lineage(tmp_path) is None
