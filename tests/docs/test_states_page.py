"""The first example of States prints what the page shows, with the checkpoint of the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_first_example_prints_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", page, flags=re.DOTALL)[:2]
    monkeypatch.chdir(ROOT)
    exec(code, {})
    assert capsys.readouterr().out == shown
