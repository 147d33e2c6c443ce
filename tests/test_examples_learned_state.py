"""The study of learned states runs in miniature; its page holds its numbers."""

from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).parents[1] / "examples" / "learned_state"


@pytest.fixture
def study(example: Any) -> Any:
    return example("learned_state/run.py")


def test_styles_and_facts_are_what_they_are_called(study: dict[str, Any]) -> None:
    assert study["in_style"]("a = 1\nb\n", "comments") == "# a = 1\n# b\n"
    assert study["in_style"]("a = 1\n", "upper case") == "A = 1\n"
    ids = study["facts_ids"](64, seed=1)
    assert ids.shape == (64, 9)
    assert len({tuple(row[:4]) for row in ids.tolist()}) == 64
    rows, asked = study["examples"]("16 facts", 0, 1)
    assert all(row["labels"].tolist() == [-100] * 5 + row["input_ids"].tolist()[5:] for row in rows)
    assert [row["input_ids"].tolist() for row in rows] == asked.tolist()


@pytest.mark.slow
def test_it_runs_in_miniature(study: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("<!-- table -->\n<!-- end -->\n")
    study["main"](["--output", str(tmp_path), "--tiny"])
    assert "->" in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text().count("\n| ") == 1 + 2
    assert (tmp_path / "learned_state.png").read_bytes().startswith(b"\x89PNG")
