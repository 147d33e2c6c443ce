"""Threads follow the cores that other work leaves."""

import time
from types import SimpleNamespace

import pytest
import torch

from hf_recurrent_lengthgen.cli import threads
from hf_recurrent_lengthgen.cli.threads import FitThreads, fitting_threads


@pytest.mark.parametrize(
    ("now", "most", "used", "load", "then"),
    [
        (2, 2, 1.95, 2.0, 2),  # alone
        (2, 2, 1.05, 3.0, 1),  # two others on two cores
        (1, 2, 0.67, 3.0, 1),
        (1, 2, 1.0, 2.2, 1),  # the other core is not free
        (1, 2, 1.0, 1.1, 2),  # and now it is
        (16, 16, 9.3, 20.0, 9),
        (9, 16, 8.9, 9.2, 10),
        (4, 4, 0.3, 12.0, 1),
        (1, 1, 0.2, 0.0, 1),
    ],
)
def test_threads_fit_the_cores_that_are_free(now: int, most: int, used: float, load: float, then: int) -> None:
    assert fitting_threads(now, most, used, load) == then


def test_a_training_gives_up_a_thread_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"processor": 0.0, "wall": 0.0, "load": 2.0, "threads": 2}
    times = SimpleNamespace(process_time=lambda: clock["processor"], perf_counter=lambda: clock["wall"])
    monkeypatch.setattr(threads, "time", times)
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (clock["load"], 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: clock["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: clock.update(threads=number))
    fit, seen = FitThreads(), []
    fit.on_train_begin(None, None, None)
    for step in range(1, 41):
        busy = 10 < step <= 30
        clock["load"] = 3.0 if busy else 1.0
        clock["processor"] += 0.5 if busy else float(clock["threads"])
        clock["wall"] += 1.0
        fit.on_step_end(None, SimpleNamespace(global_step=step), None)
        seen.append(clock["threads"])
    assert seen[:14] == [2] * 14
    assert seen[14:34] == [1] * 20
    assert seen[34:] == [2] * 6


def test_the_clocks_are_those_of_the_process() -> None:
    fit, most = FitThreads(), torch.get_num_threads()
    try:
        for step in range(FitThreads.STEPS, 4 * FitThreads.STEPS, FitThreads.STEPS):
            time.sleep(0.01)
            fit.on_step_end(None, SimpleNamespace(global_step=step), None)
            assert 1 <= torch.get_num_threads() <= most
    finally:
        torch.set_num_threads(most)
