"""Two processes (gloo on the CPU) train what one process trains with twice the batch, and resume together."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_recurrent_lengthgen.trainers.run.checkpoints import newest_complete_checkpoint, what_is_missing
from tests.versions import SINCE_5_23

# 24 rows are 6 global batches of 4, so 3 steps in each of 2 epochs, without a smaller batch: Trainer fills such a
# batch up with repeated rows when there are several processes.
RUN: dict[str, Any] = {"rows": 24, "state_drop_probability": 0.5}
STEPS = 6


def launch(toys: ModuleType, jobs: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(toys.__file__)]
    return subprocess.run([*command, json.dumps(jobs)], capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def two_processes(toys: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs on two processes: `whole`, and `killed` in process 1 in a save, not yet resumed."""
    root = tmp_path_factory.mktemp("two")
    died = {"die_at_step": 4, "die_in": "initial_states", "die_in_process": 1, "save_total_limit": 1}
    jobs = [{"output_dir": str(root / "whole")}, {"output_dir": str(root / "killed")} | died]
    done = launch(toys, [job | RUN for job in jobs])
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-2000:]
    return root


def saved(output_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(output_dir / f"checkpoint-{STEPS}" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.skipif(
    not SINCE_5_23,
    reason="Trainer of older versions maps the optimizer to the device cpu:0, which torch cannot load; GPUs work",
)
def test_two_processes_resume_bit_for_bit_after_one_was_killed_in_a_save(
    toys: ModuleType, two_processes: Path
) -> None:
    killed = two_processes / "killed"
    # Process 0 must neither mark the new checkpoint complete nor delete the old one before process 1 is done.
    assert sorted(folder.name for folder in killed.iterdir()) == ["checkpoint-4", "checkpoint-5"]
    assert "trainer_state.json is missing" in str(what_is_missing(killed / "checkpoint-5"))
    assert newest_complete_checkpoint(killed) == killed / "checkpoint-4"
    done = launch(toys, [{"output_dir": str(killed), "resume": True} | RUN])
    assert done.returncode == 0, done.stderr[-2000:]
    toys.assert_same_weights(saved(killed), saved(two_processes / "whole"))
    for rank in range(2):
        name = f"checkpoint-{STEPS}/initial_states_{rank}.safetensors"
        torch.testing.assert_close(load_file(killed / name), load_file(two_processes / "whole" / name), rtol=0, atol=0)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_refused_by_one(
    toys: ModuleType, two_processes: Path, tmp_path: Path
) -> None:
    trainer = toys.resumable_trainer(tmp_path, **RUN)
    with pytest.raises(ValueError, match=r"num_processes was 2 and is 1\. Restore the old value"):
        trainer.train(resume_from_checkpoint=str(two_processes / "whole" / "checkpoint-2"))
