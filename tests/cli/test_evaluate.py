"""Evaluation of one and of several checkpoints."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.tables import read_rows
from tests.cli.conftest import Evaluate

SEEDS = {"state_passing": (0, 2, 10), "plain": (0, 10)}
FILES = ["context_harm", "in_window", "position_wise"]


def test_one_model(evaluate: Evaluate, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(checkpoint) == 0
    out = tmp_path / "out"
    figures = [f"{name}.{kind}" for name in FILES for kind in ("png", "svg")]
    assert sorted(path.name for path in out.iterdir()) == sorted([*figures, "index.html", "result.json", "tables.md"])
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


def test_a_second_evaluation_keeps_a_table_equal_to_its_result(
    evaluate: Evaluate, checkpoint: Path, tmp_path: Path
) -> None:
    assert evaluate(checkpoint) == 0
    table = tmp_path / "out" / "result.csv"
    assert not table.exists()
    table.write_text("of an earlier result")
    assert evaluate(checkpoint, "--sequences", "2") == 0
    assert table.read_text().startswith("model,role,")


def test_the_mean_of_perplexities_is_drawn_if_requested(evaluate: Evaluate, checkpoint: Path, tmp_path: Path) -> None:
    assert evaluate(checkpoint, "--mean-perplexity", "--csv") == 0
    figure = tmp_path / "out" / "mean_perplexity.png"
    first = figure.read_bytes()
    assert evaluate(checkpoint, "--sequences", "2") == 0  # a figure that is there is kept equal to the result
    assert figure.read_bytes() != first
    rows = read_rows(tmp_path / "out" / "result.json")
    means = {name: [row["mean"] for row in rows if row["metric"] == name] for name in ("nll", "mean_perplexity")}
    assert len(means["nll"]) == len(means["mean_perplexity"]) == 64
    assert sum(means["mean_perplexity"]) > sum(map(math.exp, means["nll"]))  # exp is convex
    assert "mean_perplexity" in (tmp_path / "out" / "result.csv").read_text()


@pytest.mark.slow
def test_methods_with_several_seeds_are_compared(
    evaluate: Evaluate, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, seeds in SEEDS.items():
        for seed in seeds:
            folder = tmp_path / method / f"seed{seed}"
            shutil.copytree(checkpoint, folder)
            model = load_model(folder)
            with torch.no_grad():
                model.lm_head.weight.add_(0.1 * (1 + seed) * torch.randn_like(model.lm_head.weight))
            model.save_pretrained(folder)
    assert evaluate(tmp_path / "state_passing", tmp_path / "plain", "--roles", "intervention,base", "--no-cache") == 0
    comparison = read_result(tmp_path / "out" / "result.json", Comparison)
    found = {(model.method, model.seed): model for model in comparison.models}
    assert [*found] == [("state_passing", f"seed{seed}") for seed in (0, 2, 10)] + [
        ("plain", "seed0"),
        ("plain", "seed10"),
    ]
    [difference] = comparison.differences
    assert (difference.model, difference.minus, difference.over, difference.count) == (
        *("state_passing", "plain", "seeds", 2),
    )
    losses = {key: model.evaluation.in_window.loss.mean for key, model in found.items()}
    expected = sum(losses["state_passing", seed] - losses["plain", seed] for seed in ("seed0", "seed10")) / 2
    assert difference.in_window.mean == pytest.approx(expected)
    shown = f"state_passing - plain  {difference.harm.mean:+.3f}"
    assert shown in capsys.readouterr().out
    page, markdown = ((tmp_path / "out" / name).read_text() for name in ("index.html", "tables.md"))
    assert "<h2>Differences</h2>" in page
    assert "| state_passing - plain | " in markdown
    assert all("2 seeds" in text for text in (page, markdown))
    assert evaluate(tmp_path / "plain", tmp_path / "plain" / "seed0") == 1
    assert "can be given once" in capsys.readouterr().err
    (tmp_path / "plain" / "seed3").mkdir()
    assert evaluate(tmp_path / "plain", tmp_path / "state_passing") == 1
    assert f"no checkpoint in {tmp_path / 'plain' / 'seed3'}: finish these seeds" in capsys.readouterr().err


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
