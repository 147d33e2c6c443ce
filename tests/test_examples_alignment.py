"""The study of output alignment runs in miniature, arm by arm, and continues where it was stopped."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RUN = Path(__file__).parents[1] / "examples/alignment/run.py"
ARMS = ("passed/jeffreys_1", "tbtt_zero/sce")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(RUN))


@pytest.mark.usefixtures("small_corpus")
@pytest.mark.slow
def test_arms_are_studied_and_the_missing_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, results = tmp_path / "out", tmp_path / "results"
    arguments = ["--tiny", "--arms", *ARMS, "--seeds", "3", "--output", output, "--results", results]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines() if line.startswith("seed")] == [
        f"seed 3 {name}" for name in ("base", *ARMS)
    ]
    found = [
        json.loads((results / "running" / name / "seed3.json").read_text())["measured"] for name in ("base", *ARMS)
    ]
    assert len({arm["harm_last"]["mean"] for arm in found}) == 3
    assert (results / "alignment.png").read_bytes().startswith(b"\x89PNG")

    table = printed[printed.index("| crops start") :]
    (results / "running" / ARMS[0] / "seed3.json").unlink()
    runpy.run_path(str(RUN), run_name="__main__")
    printed = capsys.readouterr().out
    again = [line.partition(":")[0] for line in printed.splitlines() if line.startswith("seed")]
    assert again == [f"seed 3 {ARMS[0]}"]
    assert printed.endswith(table)


def test_divergences_are_those_of_the_formulas(module: dict[str, Any]) -> None:
    a, b = torch.randn(2, 5, 7, dtype=torch.float64)
    p, q = a.softmax(-1), b.softmax(-1)
    sce = [-(p[i] @ q[i].log() + q[i] @ p[i].log()) for i in range(5)]
    jeffreys = [(p[i] - q[i]) @ (p[i] / q[i]).log() for i in range(5)]
    assert module["divergences"]("at", a, b) == pytest.approx(
        {"at_sce": float(sum(sce)) / 5, "at_jeffreys": float(sum(jeffreys)) / 5}
    )
