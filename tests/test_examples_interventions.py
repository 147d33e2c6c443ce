"""The two studies run from end to end in miniature, and report what is there."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_the_interventions_are_compared(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("interventions/run.py", "--tiny", "--output", tmp_path / "out", "--seeds", 3)
    printed = capsys.readouterr().out
    table = (tmp_path / "out" / "interventions.md").read_text()
    assert table in printed
    assert len(table.splitlines()) == 2 + 19
    assert (tmp_path / "out" / "interventions.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "out" / "interventions.json").read_text())
    assert len(results["stages"]) == 19
    curve = results["stages"]["tbtt_align"]["3"]["nll"]
    assert len(curve["edges"]) == len(curve["mean"]) + 1
    assert curve["edges"][-1] == 64


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_the_failure_study_reports_four_series(example: Any, tmp_path: Path) -> None:
    example("failure/run.py", "--tiny", "--output", tmp_path / "out", "--seeds", 0)
    results = json.loads((tmp_path / "out" / "failure.json").read_text())
    series = [name.partition(":")[0] for name in results["stages"]]
    assert series.count("Training length") == 4
    assert series.count("Warm-up") == 3
    assert series.count("Further steps") == 4  # the base, 1 and 2 of state passing, 2 plain
    assert {"Training length", "Tokens seen", "Warm-up", "Further steps"} == set(series)
    assert all(set(seeds) == {"0"} for seeds in results["stages"].values())
    assert "| warm-up | 25 % of steps | 0 |" in (tmp_path / "out" / "failure.md").read_text()
    assert (tmp_path / "out" / "failure.png").is_file()


@pytest.mark.parametrize("name", ["interventions", "failure"])
def test_the_tables_hold_the_numbers_of_the_result_files(name: str) -> None:
    table = [line for line in (EXAMPLES / name / "README.md").read_text().splitlines() if line.startswith("| ")][2:]
    stages = json.loads((EXAMPLES / name / f"{name}.json").read_text())["stages"]
    assert len(table) == len(stages)
    for line, seeds in zip(table, stages.values(), strict=True):
        for quantity in ("harm_last", "in_window", "context_use"):
            mean = statistics.fmean(found[quantity]["mean"] for found in seeds.values())
            assert f"| {mean:{'+' if quantity == 'harm_last' else ''}.3f} " in line
        assert f"| {', '.join(seeds)} |" in line
