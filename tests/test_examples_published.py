"""The study of a published model runs in miniature on random weights; its page holds its numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

STUDY = Path(__file__).parents[1] / "examples/published"
VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")


@pytest.fixture
def study(example: Any) -> Any:
    return example("published/run.py")


def author_file(path: Path) -> Path:
    """Random weights under the names of the author's file."""
    layer: dict[str, tuple[int, ...]] = {f"rwkv{{}}.{name}": (1, 1, 32) for name in VECTORS}
    layer |= {f"rwkv{{}}.{part}1": (32, 8) for part in "wavg"} | {f"rwkv{{}}.{part}2": (8, 32) for part in "wavg"}
    layer |= {f"rwkv{{}}.{name}.weight": (32, 32) for name in ("receptance", "key", "value", "output")}
    layer |= {f"{name}.{part}": (32,) for name in ("ln{}a", "ln{}b", "rwkv{}.ln_x") for part in ("weight", "bias")}
    layer |= {"rwkv{}.r_k": (2, 16), "rosa{}.o.bias": (32,), "ffn{}.x_k": (1, 1, 32)}
    layer |= {"ffn{}.key.weight": (128, 32), "ffn{}.value.weight": (32, 128)}
    shapes = {name.format(number): shape for number in (1, 2) for name, shape in layer.items()}
    shapes |= {"e.weight": (12, 32), "o.weight": (12, 32), "o.bias": (12,), "lno.weight": (32,), "lno.bias": (32,)}
    torch.save({name: torch.randn(shape) / 6 for name, shape in shapes.items()}, path)
    return path


def test_rows_are_problems_and_only_answers_are_asked(study: dict[str, Any]) -> None:
    problems, tokens, labels = study["Problems"](40, 0), [11], [-100]
    for index in range(40):
        row = problems[index]
        real = int(row["attention_mask"].sum())
        one, size = row["input_ids"][:real].tolist(), real // 2 - 1
        assert one == [*one[:size], 10, *one[:size][::-1], 11]
        assert row["labels"].tolist() == [-100] * (size + 1) + one[size + 1 :] + [-100] * (128 - real)
        assert len(row["input_ids"]) == 128
        tokens += one
        labels += row["labels"][:real].tolist()
    chunks = study["ContinuedProblems"](4, 0, 2)
    assert len(chunks) == 4
    for index in range(4):
        place = index * 128
        assert chunks[index]["input_ids"].tolist() == tokens[place : place + 128]
        assert chunks[index]["shift_labels"].tolist() == labels[place + 1 : place + 129]


@pytest.mark.slow
def test_it_runs_in_miniature(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    example("published/run.py", "--tiny", *places, "--seeds", 0, "--weights", author_file(tmp_path / "author.pth"))
    said = capsys.readouterr().out
    assert said.count("seed 0 ") == 4
    assert (tmp_path / "results/published.png").stat().st_size > 1000
