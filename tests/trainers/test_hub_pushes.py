"""What a Trainer of ours uploads, in the middle of training and at its end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.cards import write_card_of_run
from hf_recurrent_lengthgen.checkpoints.records import Lineage, write_lineage
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.trainers import StatePassingTrainer
from tests.checkpoints.hub.client import run_stranger
from tests.checkpoints.hub.conftest import hub as hub
from tests.checkpoints.hub.endpoint import Endpoint
from tests.trainers import toys

PUSHING = {
    **{"push_to_hub": True, "hub_model_id": "user/run", "hub_token": "hf_test", "hub_private_repo": True},
    **{"save_strategy": "steps", "save_steps": 1, "max_steps": 1},
}

MakeConfig = Callable[..., Any]


def pushes(endpoint: Endpoint) -> dict[str, dict[str, bytes]]:
    """The files after each push, by its title; one that changes nothing makes no commit."""
    history = endpoint.repositories["user/run"].history("main")
    commits = [commit for commit in history if commit.title.startswith(("Training", "End"))]
    assert commits
    return {commit.title: {name: blob.content for name, blob in commit.files.items()} for commit in commits}


def test_every_push_holds_code_and_tokenizer_and_no_pickle(hub: Endpoint, make_config: MakeConfig) -> None:
    trainer = StatePassingTrainer(
        toys.tiny_model(), make_config(**PUSHING), train_dataset=toys.sequences(8), processing_class=byte_tokenizer()
    )
    trainer.train()
    trainer.push_to_hub()
    code = {path.name for path in Path(trainer.args.output_dir).glob("checkpoint-1/*.py")}
    assert "modeling_stateful_mamba2.py" in code
    for title, files in pushes(hub).items():
        assert {*code, "config.json", "model.safetensors", "tokenizer_config.json"} <= files.keys(), title
        assert "auto_map" in json.loads(files["config.json"])
        assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
        assert not any(b"hf_test" in content for content in files.values())
    assert "Training in progress, step 1" in pushes(hub)
    assert b"generated_from_trainer" in pushes(hub)["End of training"]["README.md"]


@pytest.mark.slow
def test_a_stranger_loads_what_was_pushed_in_the_middle(
    hub: Endpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = StatePassingTrainer(toys.tiny_model(), make_config(**PUSHING), train_dataset=toys.sequences(8))
    trainer.train()
    trainer._finish_current_push()
    commit = next(c for c in hub.repositories["user/run"].history("main") if c.title.endswith("step 1"))
    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("user/run", trust_remote_code=True, revision="{commit.id}")
torch.save(model(torch.arange(1, 6)[None]).logits, "logits.pt")
"""
    run_stranger(hub, tmp_path, code)
    expected = type(trainer.model).from_pretrained(f"{trainer.args.output_dir}/checkpoint-1")
    with torch.no_grad():
        found = torch.load(tmp_path / "logits.pt")
        torch.testing.assert_close(found, expected(torch.arange(1, 6)[None]).logits, rtol=0, atol=0)


def test_checkpoints_that_are_pushed_to_be_resumed_hold_no_arguments(hub: Endpoint, make_config: MakeConfig) -> None:
    arguments = make_config(**PUSHING, hub_strategy="checkpoint")
    trainer = StatePassingTrainer(toys.tiny_model(), arguments, train_dataset=toys.sequences(8))
    trainer.train()
    trainer._finish_current_push()
    files = next(files for title, files in pushes(hub).items() if title.endswith(", checkpoint"))
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/initial_states_0.safetensors"} <= files.keys()
    assert not [name for name in files if name.endswith("training_args.bin")]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("tags", "kept"), [("generated_from_trainer", False), ("state-passing", True), (None, False)])
def test_a_card_from_elsewhere_is_kept(tmp_path: Path, make_config: MakeConfig, tags: str | None, kept: bool) -> None:
    trainer = StatePassingTrainer(toys.tiny_model(), make_config(), train_dataset=toys.sequences(8))
    card = Path(trainer.args.output_dir) / "README.md"
    card.parent.mkdir(exist_ok=True)
    if tags is not None:
        card.write_text(f"---\ntags:\n- {tags}\n---\nMine")
    trainer.train()
    trainer.create_model_card()
    assert ("generated_from_trainer" not in card.read_text()) is kept


@pytest.mark.slow
def test_a_run_with_a_lineage_gets_the_card_of_it(hub: Endpoint, make_config: MakeConfig, tmp_path: Path) -> None:
    """By the command, whose last push has the lineage, too."""
    toys.tiny_model(vocab_size=384).save_pretrained(tmp_path / "start")
    (tmp_path / "text.txt").write_text("abc" * 2000)
    options = {
        **{"model": tmp_path / "start", "tokenizer": "bytes", "data": tmp_path / "text.txt", "training_length": 16},
        **{"max_steps": 1, "output_dir": tmp_path / "out", "use_cpu": True, "per_device_train_batch_size": 2},
        **{"push_to_hub": True, "hub_model_id": "user/run", "hub_token": "hf_test"},
    }
    assert main(["train", *[str(part) for name, value in options.items() for part in (f"--{name}", value)]]) == 0
    files = pushes(hub)["End of training"]
    assert {
        "lineage.json",
        "modeling_stateful_mamba2.py",
        "model.safetensors",
        "tokenizer_config.json",
    } <= files.keys()
    assert not [name for name in files if name.endswith(".bin")]
    card = files["README.md"].decode()
    assert "user/run" in card
    assert "1 steps" in card or "1 step" in card
    assert "generated_from_trainer" not in card
    assert not [name for name, content in files.items() if b"hf_test" in content]
    with pytest.raises(StopIteration):
        next(name for name in files if str(tmp_path) in files[name].decode(errors="replace"))


def test_a_card_with_requested_values_is_trainers(make_config: MakeConfig, tmp_path: Path) -> None:
    trainer = StatePassingTrainer(toys.tiny_model(), make_config(), train_dataset=toys.sequences(8))
    trainer.train()
    trainer.save_model()
    trainer.card_writer = write_card_of_run
    write_lineage(trainer.args.output_dir, Lineage())
    trainer.create_model_card()
    card = Path(trainer.args.output_dir) / "README.md"
    assert "generated_from_trainer" not in card.read_text()
    card.unlink()
    trainer.create_model_card(license="mit")
    assert "license: mit" in card.read_text()
    assert "generated_from_trainer" in card.read_text()


def test_a_trainer_does_not_upload_secrets(hub: Endpoint, make_config: MakeConfig) -> None:
    trainer = StatePassingTrainer(
        toys.tiny_model(), make_config(**PUSHING, hub_strategy="end"), train_dataset=toys.sequences(8)
    )
    (Path(trainer.args.output_dir) / "notes.md").write_text("hf_" + "a" * 34)
    with pytest.raises(ValueError, match=r"not uploaded: notes.md, line 1: a token or password"):
        trainer.push_to_hub()
    assert not [c for c in hub.repositories["user/run"].history("main") if c.title.startswith("End")]
