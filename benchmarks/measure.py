"""How the benchmarks measure: turns, peak memory of a process, bytes kept for the backward pass."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the definitions of scans are in tests/models


def times_of_turns(
    rounds: int, competitors: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each in each round, one after the other; a round before is not counted."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(rounds + 1):
        for name, run in competitors.items():
            began = clock()
            run()
            times[name].append(clock() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


def take_turns(rounds: int, competitors: Mapping[str, Callable[[], object]]) -> tuple[dict[str, float], float]:
    """Median seconds of each, and the median over rounds of theirs / ours."""
    times = times_of_turns(rounds, competitors)
    ratios = [theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True)]
    return {name: statistics.median(seconds) for name, seconds in times.items()}, statistics.median(ratios)


def saved_bytes(forward: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that a forward pass keeps for the backward pass, `parameters` not counted."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(size for address, size in storages.items() if address not in own)


def peak_mib() -> float:
    """Peak resident memory of this process (Linux); getrusage would count the parent's before exec, too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def in_own_process(function: str, argument: str) -> dict[str, float]:
    """Result of a function in `CALLS` of run.py, in a new process."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--call", function, argument]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(printed.splitlines()[-1])
    return result
