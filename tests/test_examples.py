"""The examples run, and the two training scripts differ in names only."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM, load_state
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with the tokenizer of the demo's."""
    sizes = {"vocab_size": 384, "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = StatefulMamba2Config(num_hidden_layers=2, **sizes, **special)
    StatefulMamba2ForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    byte_tokenizer().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_state_passing_is_a_change_of_two_names() -> None:
    plain, passing = (
        (EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("plain_trainer", "state_passing_trainer")
    )
    imports = (
        "from transformers import Trainer, TrainingArguments",
        "from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer",
    )
    assert plain.count(imports[0]) == passing.count(imports[1]) == 1
    plain = [line for line in plain if line and line != imports[0]]
    passing = [line for line in passing if line and line != imports[1]]
    renamed = [
        line.replace(" TrainingArguments(", " StatePassingConfig(").replace(" Trainer(", " StatePassingTrainer(")
        for line in plain
    ]
    assert passing == renamed
    assert sum(before != after for before, after in zip(plain, passing, strict=True)) == 2


@pytest.mark.parametrize("name", ["plain_trainer.py", "state_passing_trainer.py"])
def test_the_training_scripts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example(name, monkeypatch, "--steps", 1, "--output", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["backbone.layers.1.mixer.A_log"].shape == (6,)


def test_a_model_learns_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("copying_trainer.py", monkeypatch, "--steps", 1, "--output", tmp_path / "out")
    shown = capsys.readouterr().out
    assert [line.split(" symbols: ")[0] for line in shown.splitlines() if "of the strings" in line] == [
        "10",
        "20",
        "40",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training_length"] == 22
    assert config["task"] == {"name": "copying", "length": [5, 10], "vocabulary": 16}


def test_a_document_is_read_once_and_asked_from_the_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 2000)
    state = tmp_path / "state.safetensors"
    arguments = ("--model", checkpoint, "--document", text, "--state", state, "--tokens", 3, "--length", 5000)
    run_example("ask_a_long_document.py", monkeypatch, *arguments, "--ask", "The end", "--ask", "or")
    shown = capsys.readouterr().out
    assert "Read 5,000 tokens in " in shown
    assert "Asked 2 times" in shown
    answers = shown.split("'The end': ")[1]
    layers, metadata = load_state(state)
    assert len(layers) == 2
    assert list(metadata) == ["sha256 of the weights", "sha256 of the tokens"]
    run_example("ask_a_long_document.py", monkeypatch, *arguments, "--ask", "The end", "--ask", "or")
    again = capsys.readouterr().out
    assert "Read " not in again
    assert again.split("'The end': ")[1] == answers
    text.write_text("another text" * 1000)
    with pytest.raises(SystemExit, match="comes from another model or document"):
        run_example("ask_a_long_document.py", monkeypatch, *arguments)
    text.write_text("abc" * 2000)
    StatefulMamba2ForCausalLM(StatefulMamba2Config.from_pretrained(checkpoint)).save_pretrained(checkpoint)
    with pytest.raises(SystemExit, match="comes from another model or document"):  # trained again in its folder
        run_example("ask_a_long_document.py", monkeypatch, *arguments)


@pytest.mark.parametrize("wrong", [("--length", 0), ("--tokens", 0), ("--ask", ""), ("--document", "missing.txt")])
def test_a_document_is_asked_for_properly(
    wrong: tuple[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_example("ask_a_long_document.py", monkeypatch, *wrong)
    assert wrong[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(not hasattr(Cache, "get_recurrent_state"), reason="hybrids need Transformers 5.21 or newer")
def test_a_hybrid_trains_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("stateful_hybrid.py", monkeypatch, "--output", tmp_path / "out", "--steps", 2)
    assert "Read 660 tokens, then: 'def " in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["FalconH1ForCausalLM"]


def test_the_config_trains(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 2000)
    changes = {"model": checkpoint, "output_dir": tmp_path / "out", "data": text, "max_steps": 1, "use_cpu": True}
    flags = [str(part) for name, value in changes.items() for part in (f"--{name}", value)]
    assert main(["train", str(EXAMPLES / "train_state_passing.yaml"), *flags]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "checkpoint-1" / "initial_states_0.safetensors").is_file()
