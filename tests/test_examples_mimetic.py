"""The studies of mimetic initialization run in miniature and continue, and the README holds their results."""

import json
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "mimetic"
RUNS = {"curves": 24, "switches": 16, "state_size": 10, "state_passing": 4, "patience": 2, "teacher": 3}
FIGURES = ("curves", "switches", "state_size")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names of run.py."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(FOLDER / "run.py"))


def run_study(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("study", RUNS)
def test_a_study_writes_its_runs_a_table_and_a_figure(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(monkeypatch, study, "--quick", "--output", tmp_path, "--seeds", 4)
    printed = capsys.readouterr().out
    assert printed.count("seed=4") == RUNS[study]
    table = (tmp_path / f"{study}.md").read_text()
    assert table in printed
    results = json.loads((tmp_path / f"{study}.json").read_text())
    assert len(results) == RUNS[study]
    assert len({json.dumps(result["run"]) for result in results}) == RUNS[study]
    assert (tmp_path / f"{study}.png").is_file() == (study in FIGURES)


@pytest.mark.slow
def test_an_interrupted_study_continues_and_reports_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("state_size", "--quick", "--output", tmp_path, "--seeds", 0)
    run_study(monkeypatch, *arguments)
    first = (tmp_path / "state_size.json").read_text()
    (lost,) = (tmp_path / "runs").glob("*mimetic*N=32*")
    lost.unlink()
    capsys.readouterr()
    run_study(monkeypatch, *arguments)
    assert capsys.readouterr().out.count("seed=0") == 1
    again = json.loads((tmp_path / "state_size.json").read_text())
    assert [result["curve"] for result in again] == [result["curve"] for result in json.loads(first)]
    lost.unlink()
    run_study(monkeypatch, *arguments, "--report")
    assert capsys.readouterr().out.count("seed=0") == 0
    assert len(json.loads((tmp_path / "state_size.json").read_text())) == RUNS["state_size"] - 1


def test_starts_differ_as_they_say(modules: dict[str, Any]) -> None:
    def model(start: str) -> Any:
        run = modules["replace"](modules["COPYING"], start=start, steps=1)
        return sys.modules["learning"].new_model(run)

    default, some, hybrid = model("default"), model("a+conv"), model("hybrid")
    heads = torch.arange(1, 5).float()
    for old, new in zip(default.backbone.layers, some.backbone.layers, strict=True):
        torch.testing.assert_close(new.mixer.A_log, -8 * heads.log())
        taps = torch.tensor([0.0, 0, 0, 1]).expand_as(new.mixer.conv1d.weight)
        assert torch.equal(new.mixer.conv1d.weight, taps)
        assert torch.equal(new.mixer.dt_bias, old.mixer.dt_bias)
        assert torch.equal(new.mixer.in_proj.weight, old.mixer.in_proj.weight)
    assert [hasattr(layer.mixer, "q_proj") for layer in hybrid.backbone.layers] == [False, True]
    one, other = model("teacher 1").backbone.layers
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("study", ["curves", "switches", "state_size", "state_passing"])
def test_the_readme_holds_the_results(study: str, modules: dict[str, Any]) -> None:
    results = json.loads((FOLDER / f"{study}.json").read_text())
    table, _ = modules["STUDIES"][study][1](results)
    assert f"<!-- {study} -->\n{table}<!-- end -->" in (FOLDER / "README.md").read_text()
    lines = [line for line in table.splitlines() if "mimetic" in line or "| x | x | x | x |" in line]
    run = results[0]["run"]
    same = [r["curve"][-1][1] for r in results if {**r["run"], "seed": 0} == {**run, "seed": 0, "start": "mimetic"}]
    assert f" {statistics.fmean(same):.2f}" in "".join(lines)


@pytest.mark.usefixtures("modules")
def test_the_area_under_a_curve() -> None:
    area_under_curve = sys.modules["reports"].area_under_curve
    assert area_under_curve({1: 1.0, 2: 1.0, 4: 1.0}) == 1.0
    # between 50 and 100 the mean is 0.75, between 100 and 200 it is 0.25
    assert area_under_curve({200: 0.0, 50: 1.0, 100: 0.5}) == pytest.approx((50 * 0.75 + 100 * 0.25) / 150)
    with pytest.raises(ValueError, match="at least two lengths, got 1"):
        area_under_curve({50: 1.0})
