"""What every method owes: the same training on two processes as on one, exact resume after a kill, and features.

The methods are those of `toys.METHODS`. A run has two epochs of three steps with two micro-batches of four rows.
"""

import json
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import default_data_collator

from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from tests.trainers import toys
from tests.versions import SINCE_5_23

STEPS, ROWS = 6, 24
METHODS = list(toys.METHODS)
QUICK = ["fitted noise", "state passing", "tbtt", "alignment"]


def jobs_of(method: str, root: Path) -> dict[str, dict[str, Any]]:
    """Runs of a method by name: on one process with batches of 4, and on two with batches of 2. Runs are killed for a
    few methods only. All others resume from a checkpoint of the whole run, on two processes here, and on one in
    test_methods_on_hybrids.py."""
    jobs: dict[str, dict[str, Any]] = {}
    for processes in (1, 2):
        run = {"method": method, "rows": ROWS, "batch_size": 4 // processes, "processes": processes}
        run["save_steps"] = STEPS
        run["double"] = True  # AdamW makes a step of what is left where a gradient cancels, however little
        killed = run | {"output_dir": str(root / f"killed {processes}")}
        died = {"save_steps": 4, "die_at_step": random.choice([4, 5]), "die_in_process": random.randrange(processes)}
        jobs[f"whole {processes}"] = run | {"output_dir": str(root / f"whole {processes}")}
        if method in QUICK:
            jobs[f"killed {processes}"] = killed | died
            resume: Any = True
        elif processes == 2:
            jobs["whole 2"]["save_steps"] = 4
            resume = str(root / "whole 2" / "checkpoint-4")
        else:
            continue
        if processes == 1 or SINCE_5_23:
            jobs[f"resumed {processes}"] = killed | {"resume": resume}
    return jobs


def run_methods(methods: list[str], root: Path) -> Path:
    jobs = {(method, name): job for method in methods for name, job in jobs_of(method, root / method).items()}
    print({key: (job["die_at_step"], job["die_in_process"]) for key, job in jobs.items() if "die_at_step" in job})
    codes = toys.run_jobs(list(jobs.values()), timeout=1500)
    for (method, name), ended in zip(jobs, codes, strict=True):
        died = name.startswith("killed")
        assert (-signal.SIGKILL in ended) if died else not any(ended), (method, name, ended)
        assert not died or (root / method / name / "checkpoint-4").is_dir()
    return root


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_methods(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_methods([name for name in METHODS if name not in QUICK], tmp_path_factory.mktemp("slow"))


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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_what_one_trains_with_twice_the_batch(method: str, runs: Path) -> None:
    one, two = trained(runs / "whole 1"), trained(runs / "whole 2")
    # Sums over rows in another order; a wrong row of states makes a difference of 1e-2.
    toys.assert_same_weights(two, one, atol=1e-12)
    start = toys.weights(toys.tiny_model().double())
    still = [name for name, value in one.items() if torch.equal(value, start.get(name, torch.zeros_like(value)))]
    assert still == []
    assert method == "learned state" or start.keys() <= one.keys() | {"lm_head.weight"}
    assert any("recurrent" in name for name in one) == method.startswith("learned state")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "processes"),
    [(name, 1) for name in QUICK]
    + [pytest.param(name, 2, marks=pytest.mark.skipif(not SINCE_5_23, reason="see jobs_of")) for name in METHODS],
)
def test_a_run_resumes_bit_for_bit_in_its_second_epoch(method: str, runs: Path, processes: int) -> None:
    whole, log = what_is_left(runs / f"whole {processes}", processes)
    resumed, log_of_resumed = what_is_left(runs / f"killed {processes}", processes)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert log_of_resumed == log


# --- features of Trainer with every method ---


class CropDifferently:
    """A collator that makes every second batch three tokens shorter."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches += 1
        batch: dict[str, Tensor] = default_data_collator(items)
        return {name: value[:, : 9 - 3 * (self.batches % 2)] for name, value in batch.items()}


@pytest.mark.thinned(11)
@pytest.mark.parametrize("method", METHODS)
def test_low_precision_clipping_checkpointing_and_other_lengths_go_together(tmp_path: Path, method: str) -> None:
    name = "activation_checkpointing" if SINCE_5_23 else "gradient_checkpointing"
    continued = "tbtt" in method  # where lengths cannot change
    results = []
    for changes in ({}, {name: True}):
        fields: dict[str, Any] = {"bf16": True, "max_grad_norm": 0.05, "max_steps": 3, "save_strategy": "no"} | changes
        trainer = toys.resumable_trainer(tmp_path, method=method, **fields)
        if not continued:
            trainer.data_collator = CropDifferently()
        before = toys.weights(trainer.model)
        trainer.train()
        after = toys.weights(trainer.model)
        trainable = [name for name, value in trainer.model.named_parameters() if value.requires_grad]
        assert trainable
        assert [name for name in trainable if torch.equal(after[name], before[name])] == []
        assert all(bool(value.isfinite().all()) for value in after.values())
        kept = trainer.initial_states.state_dict()
        assert {value.dtype for value in kept.values()} <= {torch.float32}
        results.append(after)
    # Recomputed in the same low precision.
    toys.assert_same_weights(*results, atol=1e-6)


CHANGES = [
    ("random noise", {"noise_sigma": 0.5}, "noise_sigma was 0.3 and is 0.5"),
    ("fitted noise", {"fitted_noise_beta": 0.5}, "fitted_noise_beta was 0.1 and is 0.5"),
    ("tbtt", {"length": 8}, r"train_dataset.length was 9 and is 8"),
    ("tbtt", {"rows": 14}, r"train_dataset.tokens was 136 and is 127"),
    ("tbtt", {"chunks_before_reset": 5}, r"train_dataset.chunks_before_reset was 4 and is 5"),
    ("learned state", {"train_model": True}, "train_model was False and is True"),
    ("mixture", {"mixture": {"zero": 0.6, "state_passing": 0.2, "fitted_noise": 0.2}}, "mixture was .* and is"),
    ("alignment", {"alignment_alpha": 0.2}, "alignment_alpha was 0.1 and is 0.2"),
    ("zero state", {"num_hidden_layers": 3}, "model was 'StatefulMamba2ForCausalLM with .* parameters' and is"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A checkpoint of a method."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def made(method: str) -> str:
        toys.resumable_trainer(root / method, method=method, max_steps=1).train()
        return str(root / method / "checkpoint-1")

    return made


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("method", "change", "message"), CHANGES)
def test_a_changed_setting_is_refused_at_resume(
    checkpoint: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    change: dict[str, Any],
    message: str,
) -> None:
    start, change = checkpoint(method), dict(change)
    if "num_hidden_layers" in change:
        model = toys.tiny_model(**change)
        monkeypatch.setattr(toys, "tiny_model", lambda: model)
        change = {}
    chosen = toys.METHODS[method]
    layout = {name: change.pop(name) for name in ("length", "chunks_before_reset") if name in change}
    if layout:
        chunks = ContinuedChunks(toys.token_stream(118), **{"length": 9, "chunks_before_reset": 4} | layout)
        monkeypatch.setitem(toys.METHODS, method, chosen._replace(data=lambda _: chunks))
    trainer = toys.resumable_trainer(tmp_path, method=method, **change)
    before = toys.weights(trainer.model)
    with pytest.raises(
        ValueError, match=f"Cannot resume exactly from .*{message}.*Restore the old value, or start a new run"
    ):
        trainer.train(resume_from_checkpoint=start)
    toys.assert_same_weights(toys.weights(trainer.model), before)
