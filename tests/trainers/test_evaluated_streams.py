"""An evaluation on 1, 2 and 3 processes (gloo) scores each row once: of any stream, length and collator."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.trainers import toys

KINDS = ["torch", "torch, each reads", "torch, workers", "1 shard", "4 shards, each reads", "4 shards, workers"]
KINDS += ["shared", "objects", "list, objects", "flattened"]
SFT = ["SFT, 2 shards", "SFT, list, flattened", "SFT, list, packed"]
JOBS = [*product(KINDS, (1, 9, 10, 12)), *product(SFT, (2, 9))]
PACKED = ("flattened", "packed")

Results = dict[tuple[str, int], dict[int, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By job and number of processes, the result of each process."""
    jobs = [("scored", *job) for job in JOBS]
    file, here = tmp_path_factory.mktemp("streams") / "results", Path(__file__)
    command = [sys.executable, str(here.with_name("streams_in_processes.py")), str(file), json.dumps(jobs)]
    env = os.environ | {"PYTHONPATH": str(here.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(file)
    return {job: {n: [each[i] for each in results[n]] for n in results} for i, job in enumerate(JOBS)}


def by_hand(kind: str, count: int) -> tuple[float, list[int]]:
    """The mean loss over the targets of rows of 3 to 9 tokens, each read alone, and the sums of their labels."""
    model, total, targets, sums = toys.tiny_model().double(), 0.0, 0, []
    for i, row in enumerate(toys.sequences(count)):
        ids, labels = (
            row[name][: 3 + 5 * i % 7] for name in ("input_ids", "input_ids" if "SFT" in kind else "labels")
        )
        with torch.no_grad():
            total += float(cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum"))
        targets += int((labels[1:] != -100).sum())
        sums.append(int(labels[kind.endswith(PACKED) :].clamp(0).sum()))  # a packed sequence has no first target
    return total / targets, sums


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_each_row_counts_once(job: tuple[str, int], found: Results) -> None:
    loss, sums = by_hand(*job)
    for result in (each for several in found[job].values() for each in several):
        assert result["losses"] == pytest.approx([loss] * 3, rel=1e-6)
        for rows in result["sums"]:
            if job[0].endswith(PACKED):
                assert sum(rows) == sum(sums)
            else:
                in_order = "workers" not in job[0] and "shard" not in job[0]
                assert rows == sums if in_order else sorted(rows) == sorted(sums)
        assert "packed" in job[0] or result["second"] == pytest.approx(job[1], rel=0.01)
