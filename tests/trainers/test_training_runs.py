"""What a trainer writes of itself when a person saves the model."""

from pathlib import Path

import torch

from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.lineage import last_training
from hf_recurrent_lengthgen.records import read_lineage
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
    arguments = StatePassingConfig(str(tmp_path / "cured"), save_steps=2, alignment_alpha=0.0, **QUICK)
    trainer = StatePassingTrainer(start, arguments, train_dataset=blocks())
    trainer.save_model(str(tmp_path / "untrained"))
    trainer.train()
    trainer.save_model()
    assert read_lineage(tmp_path / "untrained") is None
    assert read_lineage(tmp_path / "cured" / "checkpoint-2") is None
    lineage = read_lineage(tmp_path / "cured")
    assert lineage is not None
    assert lineage.source is not None
    assert (lineage.source.name, lineage.source.format) == ("base", "lengthgen")
    (step,) = lineage.steps
    assert (step.kind, step.description) == ("train", "state_passing, 3 steps")
    assert step.training is not None
    assert (step.training.method, step.training.data) == ("state_passing", "PackedBlocks of 20 rows")
    assert (step.training.steps, step.training.tokens) == (3, 3 * 2 * 9)
    told = last_training(lineage)
    assert told is not None
    assert told.method == "state passing, zero state with probability 0.1, learning rate 5e-05"

    further = StatefulMamba2ForCausalLM.from_pretrained(tmp_path / "cured")
    noise = RandomNoiseConfig(str(tmp_path / "noise"), noise_sigma=0.1, save_strategy="no", **QUICK)
    second = RandomNoiseTrainer(further, noise, train_dataset=blocks())
    second.data_description = "numbers in order"
    second.train()
    second.save_model()
    longer = read_lineage(tmp_path / "noise")
    assert longer is not None
    assert longer.steps[0] == step
    assert [one.training.method for one in longer.steps if one.training] == ["state_passing", "random_noise"]
    assert longer.steps[1].training is not None
    assert longer.steps[1].training.data == "numbers in order"


def test_a_model_of_nowhere_gets_no_lineage(tmp_path: Path) -> None:
    arguments = StatePassingConfig(str(tmp_path), save_strategy="no", **QUICK)
    trainer = StatePassingTrainer(model(), arguments, train_dataset=blocks())
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "config.json").is_file()
    assert read_lineage(tmp_path) is None


def test_each_method_has_a_name_of_its_own() -> None:
    from hf_recurrent_lengthgen.cli.options import INTERVENTIONS

    assert {name: trainer.method for name, (trainer, _) in INTERVENTIONS.items()} == {
        name: name for name in INTERVENTIONS
    }
