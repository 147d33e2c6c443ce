"""Trained adapters: what is saved beside them, under whatever name, and what can be trained afterwards."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from hf_recurrent_lengthgen.checkpoints.loading import load_model
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


def test_all_weights_of_a_merged_model_can_be_trained_again(tmp_path: Path) -> None:
    """PEFT leaves those frozen that had no adapter: the head alone would train here."""
    toys.tiny_model().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trained(get_peft_model(load_model(str(tmp_path / "base")), config), tmp_path / "adapter")
    merged = load_model(str(tmp_path / "adapter"), merge=True)
    before = toys.weights(merged)
    after = toys.weights(trained(merged, tmp_path / "again"))
    assert [name for name in before if torch.equal(before[name], after[name])] == []
