"""The tests marked `gpu`, one by one, or on several workers where pytest-xdist is installed."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.stage import DEVICE, Stage, in_short

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Keeps the outcome of each test as a part, and stops when the time is over (workers by the hard limit)."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Tests that failed, or ended the process, come last."""
        items.sort(key=lambda item: item.nodeid in self.stage.parts)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.keep(nodeid, {"outcome": "the process ended in it"})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            result = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
            self.keep(report.nodeid, result | ({} if report.passed else {"message": reason[-500:]}))
        if report.failed and DEVICE == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                self.session.shouldstop = f"the GPU cannot be used after this error: {in_short(error)}"
        if self.stage.left() < 0:
            self.session.shouldstop = "out of time"

    def keep(self, nodeid: str, result: dict[str, Any]) -> None:
        self.stage.parts[nodeid] = result
        self.stage.write()


def run(stage: Stage) -> None:
    """The tests marked `gpu` that have not passed yet; warnings of other packages are no errors here."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text("utf-8")]
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-q", "--no-header", "-rN", "--tb=short"]
    if stage.tiny:
        files = [file for file in files if file.name == "test_kernels_gpu.py"]
        options += ["-k", "generation"]
    elif find_spec("xdist"):  # nearly all of their time is compilation of kernels, on one core each
        options += ["-n", str(max(1, (os.cpu_count() or 1) // 2))]
    done = [name for name, part in stage.parts.items() if part["outcome"] in ("passed", "skipped")]
    options += [argument for name in done for argument in ("--deselect", name)]
    options += ["-k", stage.only] if stage.only else []
    places = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *map(str, files)]
    pytest.main([*options, *places], plugins=[Recorder(stage)])


def row(parts: dict[str, Any]) -> str:
    """Outcomes, and which tests did not pass."""
    outcomes = [part["outcome"] for part in parts.values()]
    counts = ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes), reverse=True))
    failed = [name for name, part in parts.items() if part["outcome"] not in ("passed", "skipped")]
    return "; ".join([counts or "none run", *failed])
