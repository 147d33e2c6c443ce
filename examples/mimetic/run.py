"""Mimetic initialization in small: learning curves, its four switches, state sizes, and state passing on copying.

curves         four tasks, Mamba-1 and Mamba-2, default and mimetic start and one attention layer
switches       all 16 combinations of the four switches, copying
state_size     area under the generalization curve against the state size N, copying
state_passing  copying with and without state passing, on strings 6 times the shortest of training
patience       default and mimetic with four times as many steps, copying
teacher        all layers from one layer of a trained model (section 6), copying

Writes <study>.json, <study>.md and, for the first three, <study>.png into the output folder, and each run into a
folder below it. An interrupted study continues. Several processes may share the work: give them seeds in different
orders.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import reports
from learning import Result, Run, found_or_trained, train
from passing import train_with_states

TASKS = {"copying": 32, "stack_copying": 32, "sorting": 64, "recall": 64}
"""Tasks and their vocabularies."""
QUICK: dict[str, Any] = {
    **{"shortest": 3, "length": 3},
    **{"hidden_size": 8, "head_dim": 8, "steps": 2, "batch_size": 2, "evaluation_rows": 2, "final_rows": 2},
}
STATE_SIZES = (8, 16, 32, 64, 128)
COPYING = Run("copying", "mamba2", "default", seed=0)
MAMBA1: dict[str, Any] = {"state_size": 16, "shortest": 4, "length": 8, "batch_size": 32}
"""What a run of Mamba-1, whose scan costs more on a CPU, has less of."""


def curves(seed: int) -> Iterator[Run]:
    """Every task, family and start."""
    for family in reports.FAMILIES:
        for task, vocabulary in TASKS.items():
            for start in reports.STARTS:
                run = replace(COPYING, task=task, family=family, start=start, seed=seed, vocabulary=vocabulary)
                if family == "mamba":
                    run = replace(run, **MAMBA1, vocabulary=16 if "copying" in task else vocabulary)
                if task == "recall":  # a pair is two symbols
                    run = replace(run, shortest=run.shortest * 2 // 3, length=run.length * 2 // 3)
                yield run


def switches(seed: int) -> Iterator[Run]:
    """All subsets of the switches, of Mamba-2."""
    names = {0: "default", len(SWITCHES): "mimetic"}
    for subset in chain.from_iterable(combinations(SWITCHES, count) for count in range(len(SWITCHES) + 1)):
        yield replace(COPYING, start=names.get(len(subset), "+".join(subset)), seed=seed)


def state_size(seed: int) -> Iterator[Run]:
    """Default and mimetic, Mamba-2."""
    for size in STATE_SIZES:
        for start in ("default", "mimetic"):
            yield replace(COPYING, start=start, state_size=size, seed=seed, multiples=(1, 1.5, 2, 3, 4), evaluations=1)


def state_passing(seed: int) -> Iterator[Run]:
    """Strings of l to 2 l symbols, measured at 6 l; default and mimetic."""
    for start in ("default", "mimetic"):
        for states in ("zero", "passed"):
            yield replace(COPYING, start=start, seed=seed, states=states, multiples=(1, 3), evaluations=1)


def patience(seed: int) -> Iterator[Run]:
    """Four times the steps."""
    for start in ("default", "mimetic"):
        yield replace(COPYING, start=start, seed=seed, steps=4 * COPYING.steps, evaluations=4)


def teacher(seed: int) -> Iterator[Run]:
    """Each layer of a model trained from the mimetic start, and the default; every run trains its teacher."""
    for start in ("default", *(f"teacher {layer}" for layer in range(COPYING.layers))):
        yield replace(COPYING, start=start, seed=seed, evaluations=1)


STUDIES: dict[str, tuple[Callable[[int], Iterator[Run]], Callable[[Sequence[Result]], reports.Report]]] = {
    "curves": (curves, reports.curves),
    "switches": (switches, reports.switches),
    "state_size": (state_size, reports.state_size),
    "state_passing": (state_passing, reports.state_passing),
    "patience": (patience, reports.patience),
    "teacher": (teacher, reports.patience),
}


def write(study: str, results: Sequence[Result], output: Path) -> None:
    """Results as JSON, one run a line, the table, and the figure if there is one."""
    lines = ",\n".join(json.dumps(result) for result in results)
    (output / f"{study}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    table, figure = STUDIES[study][1](results)
    (output / f"{study}.md").write_text(table, encoding="utf-8")
    if figure is not None:
        save_png(figure, output / f"{study}.png")
    print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--output", default="demo-output/mimetic", help="folder for everything (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds in this order (0 1 2)")
    parser.add_argument("--family", choices=reports.FAMILIES, help="only the runs of this family (both)")
    parser.add_argument("--task", choices=TASKS, help="only the runs of this task (all)")
    parser.add_argument("--report", action="store_true", help="train nothing, report on what is there")
    parser.add_argument("--quick", action="store_true", help="sizes that show in seconds that the command works")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads are no faster at these sizes
    output = Path(options.output)
    runs = [run for seed in options.seeds for run in STUDIES[options.study][0](seed)]
    runs = [run for run in runs if options.family in (None, run.family) and options.task in (None, run.task)]
    if options.quick:
        runs = [replace(run, **QUICK) for run in runs]
    if options.report:
        runs = [run for run in runs if run.file(output / "runs").is_file()]
    trainers = {"plain": train, "zero": train_with_states, "passed": train_with_states}
    found = [found_or_trained(run, output / "runs", trainers[run.states]) for run in runs]
    write(options.study, found, output)
