"""Evaluation of one and of several checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from tests.cli.conftest import Evaluate

FILES = ["context_harm", "in_window", "position_wise"]


def test_one_model(evaluate: Evaluate, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(checkpoint) == 0
    out = tmp_path / "out"
    figures = [f"{name}.{kind}" for name in FILES for kind in ("png", "svg")]
    assert sorted(path.name for path in out.iterdir()) == sorted([*figures, "index.html", "result.json"])
    [model] = read_result(out / "result.json", Comparison).models
    assert (model.role, model.training) == ("other", None)
    found = model.evaluation
    assert (found.model, found.training_length, found.evaluated_length, found.sequences) == (checkpoint.name, 8, 64, 3)
    assert found.data.token_unit == "byte"
    assert 4 < found.in_window.loss.mean < 8  # log(384) = 5.95
    shown = capsys.readouterr()
    assert f"{found.in_window.loss.mean:.3f}" in shown.out
    assert f"Report: {out / 'index.html'}" in shown.out
    assert shown.err == ""


def test_several_models_on_the_same_text(
    evaluate: Evaluate, checkpoint: Path, stock_checkpoint: Path, tmp_path: Path
) -> None:
    assert evaluate(checkpoint, stock_checkpoint, "--tokenizer", "bytes") == 0
    comparison = read_result(tmp_path / "out" / "result.json", Comparison)
    names = [
        f"{folder.parent.name}/{folder.name}" for folder in (checkpoint, stock_checkpoint)
    ]  # the ends that differ
    assert [model.evaluation.model for model in comparison.models] == names
    assert len({model.evaluation.data.digest for model in comparison.models}) == 1
    assert len({model.evaluation.in_window.loss.mean for model in comparison.models}) == 2


def test_a_damaged_checkpoint_ends_the_command_before_the_first_is_measured(
    evaluate: Evaluate, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    os.truncate(folder / "model.safetensors", 1000)
    assert evaluate(checkpoint, folder) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.startswith("lengthgen evaluate: ")
    assert str(folder) in line
    assert not (tmp_path / "out").exists()


def test_models_with_different_tokenizers_are_not_compared(
    evaluate: Evaluate, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["extra_ids"] = 0
    settings["extra_special_tokens"] = settings["additional_special_tokens"] = ["<other>"]
    settings.pop("added_tokens_decoder", None)
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "added_tokens.json").unlink(missing_ok=True)
    assert evaluate(checkpoint, other) == 1
    assert "have different tokenizers" in capsys.readouterr().err
