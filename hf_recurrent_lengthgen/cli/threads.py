"""Threads on a machine that does other work, too."""

import os
import time
from typing import Any

import torch
from transformers import TrainerCallback


def fitting_threads(threads: int, most: int, used: float, load: float) -> int:
    """Threads to go on with.

    Threads of one operation wait for each other. Where another process holds a core, all of them wait for the one that
    has none, and a step can take ten times as long as with a single thread.

    Args:
        threads: Threads now.
        most: Threads of a machine without other work.
        used: Cores that this process got of late: its processor time by the time that passed.
        load: Processes that want a core, this one included (`os.getloadavg`).
    """
    if used < 0.75 * threads:
        return max(1, int(used))
    return min(most, threads + 1) if load < threads + 0.5 else threads


class FitThreads(TrainerCallback):
    """Uses fewer threads while other work holds cores, and more again when they are free."""

    STEPS = 5

    def __init__(self) -> None:
        self.most = torch.get_num_threads()
        self._before: tuple[float, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.STEPS:
            return
        now = time.process_time(), time.perf_counter()
        if self._before is not None:
            used = (now[0] - self._before[0]) / (now[1] - self._before[1])
            threads = fitting_threads(torch.get_num_threads(), self.most, used, os.getloadavg()[0])
            torch.set_num_threads(threads)
        self._before = now
