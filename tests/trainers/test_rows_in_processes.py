"""1, 2 and 3 processes (gloo) see and score the same rows and train the same weights, whatever is left over."""

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

BATCH = 6
ROWS, ACCUMULATIONS = range(29, 34), range(1, 4)
METHODS = ["state passing", "fitted noise", "random noise", "mixture", "learned state and model", "alignment", "tbtt"]
METHODS += ["tbtt on examples"]
PADDED: list[tuple[Any, ...]] = [("flattened", 31, 2), ("flattened", 31, 2, True)]
REFUSED: list[tuple[Any, ...]] = [("refused", "input_ids"), ("refused", "labels")]
# a seventeenth of all beside these: each method once, each number of rows and of micro-batches in one of them
TRAINED: list[tuple[Any, ...]] = [
    ("trained", "state passing", 31, 2),
    *(("trained", "state passing", *job, True) for job in [(29, 3), (30, 1), (31, 2), (33, 3)]),
    ("trained", "mixture", 29, 3),
    ("trained", "tbtt", 31, 2),
    ("trained", "tbtt on examples", 31, 2),
    *[("trained", *job) for job in product(METHODS, ROWS, ACCUMULATIONS)][::17],
    ("with_windows",),
    ("in_chunks", None),
    ("in_chunks", 2),
    ("one_in_each",),
    ("labels_first",),
]
KINDS = ["torch", "torch, each reads", "torch, workers", "1 shard", "4 shards, each reads", "4 shards, workers"]
KINDS += ["shared", "list", "list, shared", "objects", "list, objects", "flattened"]
SFT = ["SFT, 2 shards", "SFT, list, flattened", "SFT, list, packed"]
COUNTS = [(1, 10), (9, 12)]  # of rows; kinds take them in turn
SCORED: list[tuple[Any, ...]] = [
    ("scored", *job)
    for job in [*((kind, count) for i, kind in enumerate(KINDS) for count in COUNTS[i % 2]), *product(SFT, (2, 9))]
]
PACKED = ("flattened", "packed")
OTHERS: list[tuple[Any, ...]] = [("chosen",), ("counted", False), ("counted", True)]  # what fails is last

Results = dict[tuple[Any, ...], dict[int, list[Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By job and number of processes, the result of each process."""
    jobs, file = (
        [*PADDED, *REFUSED, *TRAINED, *SCORED, *OTHERS],
        tmp_path_factory.mktemp("processes") / "results",
    )
    here = Path(__file__)
    command = [sys.executable, str(here.with_name("rows_in_processes.py")), str(file), json.dumps(jobs)]
    env = os.environ | {"PYTHONPATH": str(here.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(file)
    return {job: {n: [each[i] for each in results[n]] for n in results} for i, job in enumerate(jobs)}


@pytest.mark.slow
@pytest.mark.parametrize("job", REFUSED, ids=str)
def test_processes_that_share_rows_must_have_read_the_same(job: tuple[Any, ...], found: Results) -> None:
    assert found[job][1] == [[]]
    for said in (*found[job][2], *found[job][3]):
        assert len(said) == 2
        assert all("have read different ones" in message for message in said)


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
@pytest.mark.parametrize("job", SCORED, ids=str)
def test_each_row_of_an_evaluation_counts_once(job: tuple[Any, ...], found: Results) -> None:
    _, kind, count = job
    loss, sums = by_hand(kind, count)
    for result in (each for several in found[job].values() for each in several):
        assert result["losses"] == pytest.approx([loss] * 3, rel=1e-6)
        for rows in result["sums"]:
            if kind.endswith(PACKED):
                assert sum(rows) == sum(sums)
            else:
                in_order = "workers" not in kind and "shard" not in kind
                assert rows == sums if in_order else sorted(rows) == sorted(sums)
        assert "packed" in kind or result["second"] == pytest.approx(count, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("job", PADDED, ids=str)
def test_rows_with_padding_and_packed_ones_count_the_same_on_several_processes(
    job: tuple[Any, ...], found: Results
) -> None:
    assert_same_weights({n: [weights for weights, _ in each] for n, each in found[job].items()})
    losses = [loss for each in found[job].values() for _, loss in each]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("job", TRAINED, ids=str)
def test_several_processes_train_the_weights_of_one(job: tuple[Any, ...], found: Results) -> None:
    # hybrids are stepped on with SGD, and Adam makes more of rounding
    assert_same_weights(found[job], atol=1e-6 if job[0] in ("with_windows", "in_chunks") else 1e-4)


@pytest.mark.slow
def test_all_processes_choose_the_same_checkpoint(found: Results) -> None:
    (one,) = found[("chosen",)][1]
    assert one[1:] == (3, 3.0)
    assert found[("chosen",)] == {n: [one] * n for n in (1, 2, 3)}


@pytest.mark.slow
def test_the_main_process_measures_and_all_go_on_or_end(found: Results) -> None:
    failed = "The metric 'count' failed at step 4: KeyError: 'gone'"
    for n in (1, 2, 3):
        assert found["counted", False][n] == [[0.0, 2.0, 4.0, 6.0, 8.0]] * n
        assert found["counted", True][n] == [failed] * n


def assert_same_weights(by_processes: dict[int, list[Any]], atol: float = 1e-4) -> None:
    """In float64, with losses in float32; a wrong row makes 1e-2, another window 8e-3."""
    (one,) = by_processes[1]
    for several in (by_processes[2], by_processes[3]):
        for weights in several:
            torch.testing.assert_close(weights, one, rtol=0, atol=atol)
