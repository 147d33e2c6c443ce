"""The examples run, and the two training scripts differ in names only."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from hf_recurrent_lengthgen.checkpoints.records import read_lineage, read_verification
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"


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


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["plain_trainer.py", "state_passing_trainer.py"])
def test_the_training_scripts_run(name: str, tmp_path: Path, example: Any) -> None:
    example(name, "--steps", 1, "--output", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["backbone.layers.1.mixer.A_log"].shape == (6,)


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = "".join(f"{''.join(cell['source'])}\n" for cell in cells if cell["cell_type"] == "code")
    for value, small in {"STEPS = 300": "STEPS = 2", "LENGTH = 4096": "LENGTH = 256", "[:20_000]": "[:200]"}.items():
        assert value in code
        code = code.replace(value, small)
    (tmp_path / "examples").mkdir()
    (tmp_path / "model_cards").symlink_to(EXAMPLES.parent / "model_cards")
    monkeypatch.chdir(tmp_path / "examples")
    names: dict[str, object] = {}
    exec(compile(code, "quickstart.ipynb", "exec"), names)
    assert [found.model for found in names["comparison"].differences] == ["state passing"]  # type: ignore[attr-defined]
    assert "200 bytes read" in capsys.readouterr().out


@pytest.mark.slow
def test_an_official_checkpoint_becomes_a_published_one(
    tmp_path: Path, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example("post_train_official_checkpoint.py", "--smoke", "--output", tmp_path)
    verified = {name: read_verification(tmp_path / name) for name in ("base", "state-passing")}
    assert all(found is not None and found.passed for found in verified.values())
    lineage = read_lineage(tmp_path / "state-passing")
    assert lineage is not None
    assert lineage.source is not None
    assert all("post_train_official_checkpoint.py --smoke" in step.command for step in lineage.steps)
    assert (lineage.source.format, [step.kind for step in lineage.steps]) == ("mamba-ssm", ["convert", "train"])
    assert "state passing (2 steps" in (tmp_path / "state-passing" / "README.md").read_text()
    assert "lengthgen push" in capsys.readouterr().out


def test_a_published_checkpoint_reads_on_from_a_file(
    checkpoint: Path, tmp_path: Path, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text, state = tmp_path / "text.txt", tmp_path / "state.pt"
    text.write_text("abc" * 100)
    arguments = ("--document", text, "--state", state, "--tokens", 3, "--prompt", "The end")
    example("load_post_trained_checkpoint.py", "--model", checkpoint, "--piece", 64, *arguments)
    shown = capsys.readouterr().out
    model = StatefulMamba2ForCausalLM.from_pretrained(checkpoint).eval()
    ids, prompt = (
        byte_tokenizer()(text, return_tensors="pt", add_special_tokens=False).input_ids
        for text in ("abc" * 100, "The end")
    )
    with torch.no_grad():
        torch.testing.assert_close(torch.load(state)[1][0], model(ids).final_state[1].recurrent)
    whole = model.generate(torch.cat([ids, prompt], dim=1), max_new_tokens=3, do_sample=False)
    assert "Read 300 tokens" in shown
    assert shown.splitlines()[-1] == byte_tokenizer().decode(whole[0, 300:])
    with pytest.raises(SystemExit):
        example("load_post_trained_checkpoint.py", "--model", "user/name", *arguments)
    assert "--revision" in capsys.readouterr().err.splitlines()[-1]


def test_a_published_checkpoint_needs_no_import_of_ours() -> None:
    tree = ast.parse((EXAMPLES / "load_post_trained_checkpoint.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert {name.partition(".")[0] for name in names} == {"argparse", "re", "pathlib", "torch", "transformers"}


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_supports_every_entry_of_the_configs(path: Path) -> None:
    config = load_config_from_file(str(path))  # refuses unknown entries
    written = yaml.safe_load(path.read_text())
    assert config.num_processes == (2 if written["use_cpu"] else 8 * written["num_machines"])
    assert f"--config_file examples/accelerate/{path.name}" in path.read_text()


@pytest.mark.slow
def test_a_model_learns_to_copy(tmp_path: Path, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example("copying_trainer.py", "--steps", 1, "--output", tmp_path / "out")
    shown = capsys.readouterr().out
    assert [line.split(" symbols: ")[0] for line in shown.splitlines() if "of the strings" in line] == [
        "10",
        "20",
        "40",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training_length"] == 23
    assert config["task"] == {"name": "copying", "length": [5, 10], "vocabulary": 16, "begin": True}


def test_a_document_is_read_once_and_questioned_from_the_file(
    checkpoint: Path, tmp_path: Path, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 2000)
    states = tmp_path / "states"
    arguments = ("--model", checkpoint, "--document", text, "--states", states, "--tokens", 3, "--length", 5000)
    arguments += ("--every", 2000, "--ask", "The end", "--ask", "or")
    example("ask_a_long_document.py", *arguments)
    shown = capsys.readouterr().out
    assert "Read 5,000 tokens in " in shown
    assert "Asked 2 times after 5,000 tokens" in shown
    files = {file.name: file.stat().st_mtime_ns for file in states.iterdir()}
    assert len(files) == 3
    example("ask_a_long_document.py", *arguments)
    again = capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in states.iterdir()} == files
    assert again.split("'The end': ")[1].splitlines()[:2] == shown.split("'The end': ")[1].splitlines()[:2]
    text.write_text("another text" * 1000)
    with pytest.raises(ValueError, match="5000 tokens of another text"):
        example("ask_a_long_document.py", *arguments)


@pytest.mark.slow
def test_a_hybrid_trains_and_continues(tmp_path: Path, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example("stateful_hybrid.py", "--output", tmp_path / "out", "--steps", 2)
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
