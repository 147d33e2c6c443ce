"""benchmarks/guard.py says which ratios fell; what it measures is not a test."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("guard")


@pytest.mark.slow
def test_it_runs_as_the_makefile_runs_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(FOLDER / "guard.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def rows(guard: Any, theirs: list[float]) -> list[Any]:
    ours = [1.0] * len(theirs)
    return [
        guard.Measured("scan", 2048, {"ours": ours, "theirs": theirs, "limit": [0.5] * len(theirs)}),
        guard.Measured("model, bytes kept", 1, {"ours": [2**20], "theirs": [3 * 2**20]}),
    ]


def test_a_line_has_rates_ratio_range_and_share_of_the_limit(guard: Any) -> None:
    scan, size = rows(guard, [2.0, 4.0, 3.0])
    assert guard.line(scan) == ("scan", "2,048", "683", "3.00x", "2.00 to 4.00", "4,096", "0.50")
    assert guard.line(size) == ("model, bytes kept", "1 MiB", "3 MiB", "3.00x", "", "", "")


def run(
    guard: Any, monkeypatch: pytest.MonkeyPatch, theirs: list[float], *options: str, where: str = "here", size: int = 3
) -> int:
    measured = [*rows(guard, theirs)[:1], guard.Measured("model, bytes kept", 1, {"ours": [1], "theirs": [size]})]
    monkeypatch.setattr(guard, "measured", lambda rounds: iter(measured))
    monkeypatch.setattr(guard, "machine", lambda: where)
    monkeypatch.setattr(sys, "argv", ["guard.py", *options])
    threads = torch.get_num_threads()
    try:
        code: int = guard.main()
    finally:
        torch.set_num_threads(threads)
    return code


def test_only_a_ratio_below_the_kept_rounds_fell(
    guard: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "KEPT", tmp_path / "ratios.json")
    assert run(guard, monkeypatch, [2.0, 4.0, 3.0]) == 0
    assert "No ratios are kept for this machine (here)" in capsys.readouterr().out
    assert run(guard, monkeypatch, [2.0, 4.0, 3.0], "--keep", "--json", str(tmp_path / "all.json")) == 0
    assert json.loads((tmp_path / "all.json").read_text())[0]["costs"]["theirs"] == [2.0, 4.0, 3.0]
    assert run(guard, monkeypatch, [1.91, 1.95, 1.85]) == 0  # within 5 % of the least that was kept
    assert "No ratio fell." in capsys.readouterr().out
    assert run(guard, monkeypatch, [1.89, 1.8, 4.0]) == 1
    assert "scan, to theirs: 1.89, kept 3.00 (least 2.00)" in capsys.readouterr().out
    assert run(guard, monkeypatch, [1.89, 1.8, 4.0], "--keep") == 1  # compared with what it replaces
    assert run(guard, monkeypatch, [1.89, 1.8, 4.0]) == 0


def test_on_another_machine_bytes_are_compared_and_times_roughly(
    guard: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "KEPT", tmp_path / "ratios.json")
    run(guard, monkeypatch, [2.0, 4.0, 3.0], "--keep")
    assert run(guard, monkeypatch, [1.0, 1.0, 1.0], where="there") == 0
    assert "No ratios are kept for this machine (there)" in capsys.readouterr().out
    assert run(guard, monkeypatch, [0.9, 0.9, 0.9], where="there") == 1
    assert "scan, to theirs: 0.90, kept 3.00 (least 1.00)" in capsys.readouterr().out
    assert run(guard, monkeypatch, [1.0, 1.0, 1.0], where="there", size=2) == 1
    assert "model, bytes kept, to theirs: 2.00, kept 3.00" in capsys.readouterr().out
    run(guard, monkeypatch, [1.0, 1.0, 1.0], "--keep", where="there")  # beside those of the first
    assert run(guard, monkeypatch, [0.9, 0.9, 0.9], where="there") == 1
    assert run(guard, monkeypatch, [1.9, 1.9, 1.9]) == 0
    assert run(guard, monkeypatch, [1.0, 1.0, 1.0]) == 1


def test_the_share_of_the_limit_is_compared_where_it_was_kept_only(guard: Any) -> None:
    now = {"scan, to limit": {"median": 0.2, "least": 0.2}}
    kept = {"here": {"scan, to limit": {"median": 0.5, "least": 0.5}}}
    assert guard.fallen(now, guard.comparable(kept, "here"))
    assert not guard.fallen(now, guard.comparable(kept, "there"))
    assert guard.fallen({}, guard.comparable(kept, "there")) == ["scan, to limit: no longer measured"]


def test_a_machine_is_its_processor_and_torch(guard: Any) -> None:
    assert torch.__version__ in guard.machine()
    assert torch.backends.cpu.get_cpu_capability() in guard.machine()


@pytest.mark.slow
def test_every_row_can_be_made(guard: Any) -> None:
    """With models and inputs of full size, not run: a row that cannot be made would stop the table in its middle."""
    names = [row.name for row in guard.rows() if {"ours"} < set(row.competitors)]
    assert len(names) == len(set(names)) > 10
