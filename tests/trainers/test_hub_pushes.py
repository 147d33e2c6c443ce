"""What a Trainer of ours uploads, in the middle of training and at its end."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.trainers import StatePassingTrainer
from hf_recurrent_lengthgen.trainers.hub_pushes import has_card_of_another, leave_out_pickles

from ..hub.client import PYTHON, STRANGER, environment  # noqa: TID252
from ..hub.conftest import hub  # noqa: F401, TID252
from ..hub.endpoint import Endpoint  # noqa: TID252

PUSHING = {
    **{"push_to_hub": True, "hub_model_id": "user/run", "hub_token": "hf_test", "hub_private_repo": True},
    **{"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "hub_always_push": True},
}


def pushed(endpoint: Endpoint, title: str) -> dict[str, bytes]:
    """The files after the first commit whose title begins so."""
    history = endpoint.repositories["user/run"].history("main")
    commit = next(commit for commit in reversed(list(history)) if commit.title.startswith(title))
    return {name: blob.content for name, blob in commit.files.items()}


def test_every_push_holds_code_and_tokenizer_and_no_pickle(
    hub: Endpoint,  # noqa: F811
    toys: ModuleType,
    make_config: Callable[..., Any],
) -> None:
    trainer = StatePassingTrainer(
        toys.tiny_model(), make_config(**PUSHING), train_dataset=toys.sequences(8), processing_class=byte_tokenizer()
    )
    trainer.train()
    trainer.push_to_hub()
    code = {path.name for path in Path(trainer.output_dir).glob("checkpoint-1/*.py")}
    assert "modeling_stateful_mamba2.py" in code
    for title in ("Training in progress, step 1", "End of training"):
        files = pushed(hub, title)
        assert {*code, "config.json", "model.safetensors", "tokenizer_config.json"} <= files.keys(), title
        assert "auto_map" in json.loads(files["config.json"])
        assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
        assert not any(b"hf_test" in content for content in files.values())
    assert b"generated_from_trainer" in pushed(hub, "End of training")["README.md"]


@pytest.mark.slow
def test_a_stranger_loads_what_was_pushed_in_the_middle(
    hub: Endpoint,  # noqa: F811
    toys: ModuleType,
    make_config: Callable[..., Any],
    tmp_path: Path,
) -> None:
    trainer = StatePassingTrainer(toys.tiny_model(), make_config(**PUSHING), train_dataset=toys.sequences(8))
    trainer.train()
    trainer._finish_current_push()
    commit = next(c for c in hub.repositories["user/run"].history("main") if c.title.endswith("step 1"))
    code = f"""{STRANGER}
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("user/run", trust_remote_code=True, revision="{commit.id}")
torch.save(model(torch.arange(1, 6)[None]).logits, "logits.pt")
"""
    subprocess.run([*PYTHON, code], cwd=tmp_path, env=environment(hub, tmp_path / "home"), check=True)
    expected = type(trainer.model).from_pretrained(f"{trainer.output_dir}/checkpoint-1")
    with torch.no_grad():
        found = torch.load(tmp_path / "logits.pt")
        torch.testing.assert_close(found, expected(torch.arange(1, 6)[None]).logits, rtol=0, atol=0)


def test_checkpoints_that_are_pushed_to_be_resumed_hold_no_arguments(
    hub: Endpoint,  # noqa: F811
    toys: ModuleType,
    make_config: Callable[..., Any],
) -> None:
    arguments = make_config(**PUSHING, hub_strategy="checkpoint")
    trainer = StatePassingTrainer(toys.tiny_model(), arguments, train_dataset=toys.sequences(8))
    trainer.train()
    trainer._finish_current_push()
    files = pushed(hub, "Training in progress, step 2, checkpoint")
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/initial_states_0.safetensors"} <= files.keys()
    assert not [name for name in files if name.endswith("training_args.bin")]


def test_adapters_are_pushed_without_code(
    hub: Endpoint,  # noqa: F811
    toys: ModuleType,
    make_config: Callable[..., Any],
) -> None:
    model = get_peft_model(toys.tiny_model(), LoraConfig(target_modules=["in_proj"]))
    trainer = StatePassingTrainer(model, make_config(**PUSHING), train_dataset=toys.sequences(8))
    trainer.train()
    trainer.push_to_hub()
    for title in ("Training in progress, step 1", "End of training"):
        files = pushed(hub, title)
        assert "adapter_model.safetensors" in files
        assert not [name for name in files if name.endswith((".py", ".bin"))]
    assert b"library_name: peft" in files["README.md"]


def test_a_gitignore_of_the_user_keeps_its_lines(tmp_path: Path) -> None:
    leave_out_pickles(tmp_path / "new")
    assert (tmp_path / "new" / ".gitignore").read_text() == "training_args.bin\n"
    (tmp_path / ".gitignore").write_text("runs/\n*.log")
    for _ in range(2):
        leave_out_pickles(tmp_path)
        assert (tmp_path / ".gitignore").read_text() == "runs/\n*.log\ntraining_args.bin\n"


@pytest.mark.parametrize(("tags", "kept"), [("generated_from_trainer", False), ("state-passing", True), (None, False)])
def test_a_card_from_elsewhere_is_kept(
    tmp_path: Path, toys: ModuleType, make_config: Callable[..., Any], tags: str | None, kept: bool
) -> None:
    trainer = StatePassingTrainer(toys.tiny_model(), make_config(), train_dataset=toys.sequences(8))
    card = Path(trainer.output_dir) / "README.md"
    card.parent.mkdir(exist_ok=True)
    if tags is not None:
        card.write_text(f"---\ntags:\n- {tags}\n---\nMine")
    assert has_card_of_another(trainer.output_dir) is kept
    trainer.train()
    trainer.create_model_card()
    assert ("generated_from_trainer" not in card.read_text()) is kept


def test_a_card_of_peft_is_for_trainer_to_change(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    assert not has_card_of_another(tmp_path)
