"""What the studies share: results of other settings are not reported, and tiny runs keep away from READMEs."""

import argparse
import sys
from argparse import Namespace
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import small_setting

    return small_setting


def test_results_of_other_settings_are_none(shared: Any, tmp_path: Path) -> None:
    settings = make_dataclass("Settings", [("steps", tuple[int, ...])])
    studies = [
        shared.Stages(Namespace(output=tmp_path, results=tmp_path / "results", report=True), settings(steps), "")
        for steps in ((1, 2), (1, 3))
    ]
    studies[0].kept.put("base", 0, {"key": {"settings": {"steps": [1, 2]}}, "measured": {"share": 0.5}})
    assert [study.measured(["base", "other"], [0, 1]) for study in studies] == [{"base": {0: {"share": 0.5}}}, {}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "study/results"),
        (["--tiny"], "out/tiny_study"),
        (["--tiny", "--results", "elsewhere"], "elsewhere"),
    ],
)
def test_tiny_runs_have_results_of_their_own(
    given: list[str], expected: str, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", "out", *given])
    parser: argparse.ArgumentParser = shared.options_of("", Path("study/results"))
    assert shared.parsed(parser).results == expected


def test_a_readme_is_filled_between_its_markers(shared: Any, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n")
    shared.fill(readme, {"one": "| 1 \\1 |\n", "two": "new\n"})
    assert readme.read_text() == "a\n<!-- one -->\n| 1 \\1 |\n<!-- end -->\nb\n<!-- two -->\nnew\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 places for 'three'"):
        shared.fill(readme, {"three": ""})
