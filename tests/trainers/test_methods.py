"""What every method owes: the same training on two processes as on one, exact resume after a kill, and features.

The methods are those of `toys.METHODS`. A run has two epochs of three steps with two micro-batches of four rows.
"""

import json
import random
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor

NEW = Version(transformers.__version__) >= Version("5.23")
STEPS, ROWS = 6, 24
QUICK = ["fitted noise", "state passing", "tbtt", "alignment"]
METHODS = [
    "zero state",
    "random noise",
    "fitted noise",
    "state passing",
    "tbtt",
    "tbtt by document",
    "tbtt on a stream",
    "learned state",
    "learned state and model",
    "mixture",
    "alignment",
    "state passing, alignment",
    "tbtt, alignment",
    "state passing in chunks",
]
SELECTED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


def test_the_table_of_methods_is_whole(toys: ModuleType) -> None:
    assert list(toys.METHODS) == METHODS


def jobs_of(method: str, root: Path) -> dict[str, dict[str, Any]]:
    """Runs of a method by name: on one process with batches of 4, and on two with batches of 2."""
    jobs: dict[str, dict[str, Any]] = {}
    for processes in (1, 2):
        rows = 2 if method == "tbtt on a stream" else 4 // processes  # a stream is made for rows of two
        run = {"method": method, "rows": ROWS, "batch_size": rows, "processes": processes, "save_steps": STEPS}
        killed = run | {"output_dir": str(root / f"killed {processes}")}
        died = {"save_steps": 4, "die_at_step": random.choice([4, 5]), "die_in_process": random.randrange(processes)}
        jobs[f"whole {processes}"] = run | {"output_dir": str(root / f"whole {processes}")}
        jobs[f"killed {processes}"] = killed | died
        if processes == 1 or NEW:  # see test_processes.py
            jobs[f"resumed {processes}"] = killed | {"resume": True}
    return jobs


def run_methods(toys: ModuleType, methods: list[str], root: Path) -> Path:
    jobs = {(method, name): job for method in methods for name, job in jobs_of(method, root / method).items()}
    print({key: (job["die_at_step"], job["die_in_process"]) for key, job in jobs.items() if "die_at_step" in job})
    codes = toys.run_jobs(list(jobs.values()), timeout=1500)
    for (method, name), ended in zip(jobs, codes, strict=True):
        died = name.startswith("killed")
        assert (-signal.SIGKILL in ended) if died else not any(ended), (method, name, ended)
        assert not died or (root / method / name / "checkpoint-4").is_dir()
    return root


@pytest.fixture(scope="module")
def quick_runs(toys: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_methods(toys, QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow_runs(toys: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_methods(toys, [name for name in METHODS if name not in QUICK], tmp_path_factory.mktemp("slow"))


@pytest.fixture
def runs(request: pytest.FixtureRequest, method: str) -> Path:
    """Folder of the runs of a method."""
    root: Path = request.getfixturevalue("quick_runs" if method in QUICK else "slow_runs")
    return root / method


def what_is_left(output_dir: Path, processes: int) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """All tensors of the last checkpoint, and the log without its times."""
    folder = output_dir / f"checkpoint-{STEPS}"
    files = [*folder.glob("*.safetensors")]
    assert {f"initial_states_{rank}.safetensors" for rank in range(processes)} < {file.name for file in files}
    kept: dict[str, Any] = {file.name: load_file(file) for file in files}
    kept["optimizer"] = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert len(log) == STEPS
    return kept, log


def trained(output_dir: Path) -> dict[str, Tensor]:
    """Everything that was trained."""
    files = [output_dir / f"checkpoint-{STEPS}" / name for name in ("model.safetensors", "learned_state.safetensors")]
    return {name: value for file in files if file.exists() for name, value in load_file(file).items()}


@pytest.mark.parametrize("method", [name for name in SELECTED if "stream" not in str(name)])
def test_two_processes_train_what_one_trains_with_twice_the_batch(toys: ModuleType, method: str, runs: Path) -> None:
    one, two = trained(runs / "whole 1"), trained(runs / "whole 2")
    # Sums over rows in another order; a wrong row of states makes a difference of 1e-2.
    toys.assert_same_weights(two, one, atol=2e-5)
    start = toys.weights(toys.tiny_model())
    still = [name for name, value in one.items() if torch.equal(value, start.get(name, torch.zeros_like(value)))]
    assert still == []
    assert method == "learned state" or start.keys() <= one.keys() | {"lm_head.weight"}
    assert ("layers.1.recurrent" in one) == method.startswith("learned state")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.skipif(not NEW, reason="see jobs_of"))])
@pytest.mark.parametrize("method", SELECTED)
def test_a_killed_run_resumes_bit_for_bit_in_its_second_epoch(method: str, runs: Path, processes: int) -> None:
    whole, log = what_is_left(runs / f"whole {processes}", processes)
    resumed, log_of_resumed = what_is_left(runs / f"killed {processes}", processes)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert log_of_resumed == log
