"""Processes that share rows (context parallelism) train what one process trains on whole rows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_recurrent_lengthgen.trainers.checks import check_trainer
from hf_recurrent_lengthgen.trainers.run.distributed_sequences import DistributedSequences
from tests.trainers import toys

# what one process trains with 4 rows of 9 tokens in a micro-batch, by processes and context_parallel_size; no 3, since
# Transformers computes losses in float32, where a third is rounded, and Adam divides by small gradients
SHARED = [(2, 2), (4, 2), (4, 4)]
STEPS = 6
METHODS = [
    *("zero state", "fitted noise", "state passing", "tbtt by document", "learned state and model", "mixture"),
    "statex, state passing",
]


def jobs_of(root: Path, method: str) -> list[dict[str, Any]]:
    """One of `SHARED` for each method in turn, all of them for state passing."""
    number = METHODS.index(method)
    return [
        {
            "output_dir": str(root / method.replace(" ", "_") / f"{processes}_{size}"),
            "processes": processes,
            "context_parallel_size": size,
            "batch_size": 4 * size // processes,
            "method": method,
            "double": True,
            "rows": 24,
            "save_steps": STEPS,
        }
        for processes, size in (SHARED if method == "state passing" else [SHARED[number % 3]])
    ]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    jobs = [job for method in METHODS for job in jobs_of(root, method)]
    *codes, _, again = toys.run_jobs([*jobs, *resumed_jobs(root)], timeout=1200)
    assert not any(code for each in [*codes, again] for code in each)
    return root


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of the model, unless a learned state is all that was trained."""
    file = checkpoint / "model.safetensors"
    return load_file(file) if file.is_file() else {}


def resumed_jobs(root: Path) -> list[dict[str, Any]]:
    """A run that is killed in a save of process 1 and resumed, on 2 x 2 processes."""
    (job,) = [job for job in jobs_of(root, "state passing") if job["output_dir"].endswith("4_2")]
    job = job | {"output_dir": str(root / "resumed")}
    died = {"die_at_step": 2, "die_in": "initial_states", "die_in_process": 1}
    return [job | died | {"save_steps": 1}, job | {"resume": True}]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_processes_that_share_rows_train_what_one_trains(shared: Path, tmp_path: Path, method: str) -> None:
    trainer = toys.resumable_trainer(tmp_path, batch_size=4, method=method, double=True, rows=24, save_steps=STEPS)
    trainer.train()
    expected = weights_of(last_checkpoint(tmp_path))
    carried = trainer.initial_states.state_dict()
    for job in jobs_of(shared, method):
        folder, size = last_checkpoint(Path(job["output_dir"])), job["context_parallel_size"]
        toys.assert_same_weights(weights_of(folder), expected, atol=1e-12)
        entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (entries, trainer.state.log_history)]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=0, atol=1e-5)
        states = [load_file(folder / f"initial_states_{rank}.safetensors") for rank in range(job["processes"])]
        for name, rows in carried.items():
            for group in range(0, len(states), size):
                assert all(torch.equal(states[group][name], one[name]) for one in states[group : group + size])
            found = torch.cat([one[name] for one in states[::size]]) if "micro_batches" in name else states[0][name]
            torch.testing.assert_close(found, rows, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_save_resumes_bit_for_bit(shared: Path) -> None:
    (whole,) = [job for job in jobs_of(shared, "state passing") if job["output_dir"].endswith("4_2")]
    found, expected = (last_checkpoint(Path(folder)) for folder in (shared / "resumed", whole["output_dir"]))
    assert found.name == expected.name
    toys.assert_same_weights(weights_of(found), weights_of(expected))
    for rank in range(4):
        name = f"initial_states_{rank}.safetensors"
        torch.testing.assert_close(load_file(found / name), load_file(expected / name), rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [{"alignment_alpha": 0.1}, {"bptt_chunk_length": 4}, {"torch_compile": True}],
    ids=str,
)
def test_what_needs_whole_rows_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="context_parallel_size does not work with"):
        toys.StatePassingTrainer.config_class(str(tmp_path), **toys.QUIET, context_parallel_size=2, **settings)


def test_the_rows_of_each_group_are_gathered_once_and_repeated_ones_left_out() -> None:
    of_processes = torch.tensor([1, 2, 1, 2, 3, 1, 3, 1])  # four processes in two groups; the last row is repeated
    mesh = SimpleNamespace(size=lambda: 4)
    ending = SimpleNamespace(remainder=3, end_of_dataloader=True)
    accelerator = SimpleNamespace(gather=lambda _: of_processes, gradient_state=ending)
    assert DistributedSequences(2, mesh=mesh).gather_once(accelerator, None).tolist() == [1, 2, 3]
    ending.end_of_dataloader = False
    assert DistributedSequences(2, mesh=mesh).gather_once(accelerator, None).tolist() == [1, 2, 3, 1]


def test_groups_must_fill_the_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="context_parallel_size=2 must divide the number of processes, 1"):
        toys.resumable_trainer(tmp_path, context_parallel_size=2)


def test_a_model_that_shares_no_rows_is_refused(tmp_path: Path) -> None:
    trainer = toys.resumable_trainer(tmp_path)
    trainer.args.context_parallel_size, trainer.model = 2, toys.SumModel()
    with pytest.raises(ValueError, match="SumModel takes no sequence_group"):
        check_trainer(trainer)
