"""`lengthgen expand`, and training with an expansion."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.main import main
from tests.hybrids.tiny_models import tiny_model

TOKENS = torch.arange(3, 40)[None]


def expand(*arguments: Any) -> int:
    return main(["expand", *map(str, arguments)])


def test_a_checkpoint_is_expanded_and_can_be_trained(
    checkpoint: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "expanded"
    assert expand(checkpoint, "--output", out, "--layers", 1, "--factor", 3, "--initialization", "inherit") == 0
    shown = capsys.readouterr().out
    assert "layer 1: state_size 4 -> 12\n" in shown
    assert f"Next (--intervention may be another): lengthgen train --model {out} --output {out}-trained " in shown
    expanded, base = load_model(str(out)), load_model(str(checkpoint))
    assert expanded.config.layer_state_sizes == [4, 12]
    assert expanded.config.training_length == 8
    assert expanded.config.interventions == ["state expansion, state_size 4 -> 12 in layer 1, inherit"]
    torch.testing.assert_close(expanded(TOKENS).logits, base(TOKENS).logits, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    assert [path.name for path in out.parent.iterdir()] == ["expanded"]
    run = ["--data", text_file, "--training-length", 8, "--max-steps", 2, "--use-cpu", "--save-strategy", "no"]
    trained = tmp_path / "trained"
    assert main(["train", "--model", str(out), "--output", str(trained), *map(str, run)]) == 0
    assert load_model(str(trained)).config.layer_state_sizes == [4, 12]


@pytest.mark.slow
def test_the_trainer_of_the_command_line_expands_too_and_resumes(
    checkpoint: Path, tmp_path: Path, text_file: Path
) -> None:
    run = ["train", "--model", checkpoint, "--output", tmp_path / "out", "--data", text_file, "--use-cpu"]
    run += ["--training-length", 8, "--save-steps", 2, "--intervention", "statex", "--expand-layers", 0]
    run += ["--expand-factor", 2, "--mixture", '{"state_passing": 1.0}', "--new-weights-lr-multiplier", 3]
    assert main([*map(str, run), "--max-steps", "2"]) == 0
    assert main([*map(str, run), "--max-steps", "4", "--resume"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_state_sizes"] == [8, 4]
    assert config["interventions"] == ["state expansion, state_size 4 -> 8 in layer 0, reinit", "statex, 4 steps"]
    assert load_model(str(tmp_path / "out")).config.training_length == 8


def test_layers_of_the_trainer_may_be_a_list_in_a_file(checkpoint: Path, tmp_path: Path, text_file: Path) -> None:
    lines = {"model": checkpoint, "output_dir": tmp_path / "out", "data": text_file, "intervention": "statex"}
    lines |= {"expand_layers": [1], "max_steps": 1, "training_length": 8, "use_cpu": True, "save_strategy": "no"}
    (tmp_path / "run.yaml").write_text("\n".join(f"{name}: {value}" for name, value in lines.items()))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert load_model(str(tmp_path / "out")).config.layer_state_sizes == [4, 16]


def test_a_stock_checkpoint_without_tokenizer_becomes_ours(
    stock_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert expand(stock_checkpoint, "--output", tmp_path / "out", "--count", 1, "--state-size", 6) == 0
    assert "holds no tokenizer, so none is saved" in capsys.readouterr().out
    assert load_model(str(tmp_path / "out")).config.layer_state_sizes == [6, 4]


def test_a_hybrid_needs_all_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("bamba").save_pretrained(tmp_path / "bamba")
    assert expand(tmp_path / "bamba", "--output", tmp_path / "out") == 1
    assert 'give layers="all"' in capsys.readouterr().err
    assert expand(tmp_path / "bamba", "--output", tmp_path / "out", "--layers", "all") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mamba_d_state"] == 24
