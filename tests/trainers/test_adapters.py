"""Trained adapters: what is saved beside them, under whatever name, and what can be trained afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.checkpoints.records import Adapter, read_lineage
from hf_recurrent_lengthgen.trainers import InitialStateConfig, ZeroStateTrainer
from tests.trainers import toys


def trained(model: Any, folder: Path) -> Any:
    """The model after two steps, saved in the folder."""
    settings: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    args = InitialStateConfig(str(folder), use_cpu=True, report_to="none", save_strategy="no", **settings)
    trainer = ZeroStateTrainer(model, args, train_dataset=toys.sequences(4))
    trainer.train()
    trainer.save_model()
    return model.eval()


def test_an_adapter_with_a_name_of_its_own_is_recorded_as_any_other(tmp_path: Path) -> None:
    toys.tiny_model().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["in_proj"], task_type="CAUSAL_LM")
    model = trained(get_peft_model(load_model(str(tmp_path / "base")), config, adapter_name="mine"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"out holds no config\.json, but folders of adapters: give one.*out/mine\."):
        load_model(str(tmp_path / "out"))
    adapter = tmp_path / "out" / "mine"
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(load_model(str(adapter))(input_ids=ids).logits, model(input_ids=ids).logits)
    lineage = read_lineage(adapter)
    assert lineage is not None
    assert lineage.steps[-1].training is not None
    assert lineage.steps[-1].training.adapter == Adapter("LORA", 2, 6.0, ("in_proj",))
    weights = tmp_path / "base" / "model.safetensors"
    toys.tiny_model(seed=1).save_pretrained(weights.parent)
    with pytest.raises(ValueError, match=r"of which these files have changed since: model\.safetensors"):
        load_model(str(adapter))


def test_an_adapter_of_a_model_in_memory_says_that_it_has_no_base(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM")
    with CaptureLogger(logging.get_logger("hf_recurrent_lengthgen.trainers.run.records")) as log:
        model = trained(get_peft_model(toys.tiny_model(), config), tmp_path / "out")
    assert "names no base, because its model was made in memory" in log.out
    assert read_lineage(tmp_path / "out") is None
    with pytest.raises(ValueError, match=r"The base of the adapter .* does not exist"):
        load_model(str(tmp_path / "out"))
    ids = torch.arange(3, 12)[None]
    logits = model(input_ids=ids).logits
    model.unload().save_pretrained(tmp_path / "base")  # as the warning says
    settings = tmp_path / "out" / "adapter_config.json"
    config_of_it = json.loads(settings.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    settings.write_text(json.dumps(config_of_it))
    torch.testing.assert_close(load_model(str(tmp_path / "out"))(input_ids=ids).logits, logits)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_best_weights_of_an_adapter_are_loaded_in_the_end_whatever_its_name(tmp_path: Path, name: str) -> None:
    config = LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(toys.tiny_model(), config, adapter_name=name)
    settings: dict[str, Any] = {
        "max_steps": 4,
        "learning_rate": 1.0,
        "per_device_train_batch_size": 2,
        "load_best_model_at_end": True,
    }
    settings |= {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True}
    args = InitialStateConfig(str(tmp_path), **settings, **toys.QUIET)
    rows = toys.sequences(8)
    trainer = ZeroStateTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = max(losses, key=lambda step: losses[step])
    assert losses[best] != losses[4]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best])
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


def test_all_weights_of_a_merged_model_can_be_trained_again(tmp_path: Path) -> None:
    """PEFT leaves those frozen that had no adapter: the head alone would train here."""
    toys.tiny_model().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trained(get_peft_model(load_model(str(tmp_path / "base")), config), tmp_path / "adapter")
    merged = load_model(str(tmp_path / "adapter"), merge=True)
    before = toys.weights(merged)
    after = toys.weights(trained(merged, tmp_path / "again"))
    assert [name for name in before if torch.equal(before[name], after[name])] == []
