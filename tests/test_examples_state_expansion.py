"""The study of state expansion runs from end to end in miniature and continues; its page holds its numbers."""

import json
import runpy
import statistics
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[1] / "examples" / "state_expansion"


def run_study(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(STUDY / "run.py"), run_name="__main__")


@pytest.mark.slow  # ten training runs
def test_the_methods_are_compared_and_an_interrupted_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(monkeypatch, "--output", tmp_path, "--seeds", 3)
    printed, out = capsys.readouterr().out, tmp_path / "state_expansion"
    table = (out / "state_expansion.md").read_text()
    assert table in printed
    stages = json.loads((out / "state_expansion.json").read_text())["stages"]
    assert len(table.splitlines()) == 2 + len(stages) == 2 + 9
    states = {name: found["3"]["state"] for name, found in stages.items()}
    layer = 2 * 8 * 2  # 2 heads of 8 channels, N = 2, eight times as much where expanded
    assert states["vanilla"] == states["base"] == 4 * layer
    assert [states[f"reinit_{count}"] for count in (1, 2, 4)] == [(4 + 7 * count) * layer for count in (1, 2, 4)]
    assert states["large"] == states["inherit_4"] == 32 * layer
    assert (out / "state_expansion.png").read_bytes().startswith(b"\x89PNG")
    (out / "seed3" / "inherit_2" / "stage.json").unlink()
    run_study(monkeypatch, "--output", tmp_path, "--seeds", 3)
    again = capsys.readouterr().out
    trained = [line.partition(":")[0] for line in again.splitlines() if line.startswith("seed")]
    assert trained == ["seed 3 inherit_2"]
    run_study(monkeypatch, "--output", tmp_path, "--seeds", 3, 4, "--report")
    assert capsys.readouterr().out.strip() == (out / "state_expansion.md").read_text().strip()


@pytest.mark.skipif(not (STUDY / "state_expansion.json").is_file(), reason="the study has not been recorded yet")
def test_the_table_of_the_page_holds_the_numbers_of_the_result_file() -> None:
    table = [line for line in (STUDY / "README.md").read_text().splitlines() if line.startswith("| ")][2:]
    stages = json.loads((STUDY / "state_expansion.json").read_text())["stages"]
    assert len(table) == len(stages)
    for line, seeds in zip(table, stages.values(), strict=True):
        assert f"| {', '.join(seeds)} |" in line
        for pairs in next(iter(seeds.values()))["accuracy"]:
            mean = statistics.fmean(found["accuracy"][pairs] for found in seeds.values())
            assert f"| {mean:.3f} (" in line
