"""Processes that share rows (context parallelism) train what one process trains on whole rows."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

# what one process trains with 4 rows of 9 tokens in a micro-batch, by processes and context_parallel_size
SHARED = [(2, 2), (4, 2), (3, 3)]
METHODS = [
    *("zero state", "random noise", "fitted noise", "state passing", "tbtt", "tbtt by document", "learned state"),
    *("learned state and model", "mixture", "statex", "statex, state passing"),
]


def jobs_of(root: Path, method: str) -> list[dict[str, Any]]:
    return [
        {
            "output_dir": str(root / method.replace(" ", "_") / f"{processes}_{size}"),
            "processes": processes,
            "context_parallel_size": size,
            "batch_size": 4 * size // processes,
            "method": method,
            "double": True,
        }
        for processes, size in SHARED
    ]


@pytest.fixture(scope="module")
def shared(toys: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    codes = toys.run_jobs([job for method in METHODS for job in jobs_of(root, method)], timeout=1200)
    assert not any(code for each in codes for code in each)
    return root


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_processes_that_share_rows_train_what_one_trains(
    toys: ModuleType, shared: Path, tmp_path: Path, method: str
) -> None:
    trainer = toys.resumable_trainer(tmp_path, batch_size=4, method=method, double=True)
    trainer.train()
    expected = load_file(last_checkpoint(tmp_path) / "model.safetensors")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    states = trainer.initial_states.state_dict()
    for job in jobs_of(shared, method):
        folder = last_checkpoint(Path(job["output_dir"]))
        toys.assert_same_weights(load_file(folder / "model.safetensors"), expected, atol=1e-10)
