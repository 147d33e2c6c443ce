"""The laws of "Stuffed Mamba" (arXiv:2410.07145) in small: T_forget and T_recall of families of tiny models.

text    bytes of text: the least training length from which on DeltaNets of a state size do not fail on 8,192 bytes
        (T_forget)
needle  a symbol after a mark, among other symbols: the length up to which Mamba-2 models recall it (T_recall)

Writes into the output folder: runs.jsonl (`ArmResults`), forget.json and recall.json (`law.Law`), forget.png,
recall.png and tables.md. An interrupted study continues.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from scaling_laws import forget_threshold, loss_ratio, recall_threshold

from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.results import Curve
from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.plotting.images import save_png

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm_results import ArmResults
from law import Law, fit_law
from law_figure import law_figure
from law_tables import formulas, short
from study_pages import markdown
from training import Result, Run, result_of, trained

STATE_SIZES = {"text": (8, 16, 32, 64), "needle": (4, 8, 16, 32, 64)}
TEXT = Run("text", 8, 16, seed=0, family="delta_net", steps=500, tokens=2048, learning_rate=4e-3)
NEEDLE = Run(
    **{"task": "needle", "state_size": 4, "length": 128, "seed": 0},
    **{"hidden_size": 32, "head_dim": 16, "mimetic_c": 8.0, "mimetic_offset": 0},
    **{"initializer_range": 0.1, "steps": 200, "tokens": 64, "positions": 4096, "rows": 128},
)
LENGTHS = {"text": (8, 16, 32, 64, 128, 256), "needle": (128,)}
"""Training lengths."""
SEEDS = {"text": 2, "needle": 8}
QUICK: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "steps": 2,
    "rows": 4,
    "window_tokens": 512,
    "positions": 256,
}
SKIP = 1 / 8
"""Share of the training length that is left out of the largest loss."""
RULES = {
    "forget": "fails if the loss in any bin (a factor of sqrt 2 wide) up to 8,192 bytes is above twice the greatest "
    "one in the last 7/8 of the training length",
    "recall": "length up to which 95 % of 128 needles at even depths are recalled",
}
UNITS = {"size_unit": 1000, "length_unit": 1}


def runs(tasks: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """All runs, by seed, task, training length and state size; a task has its number of seeds at most."""
    for task in tasks:
        of_task = NEEDLE if task == "needle" else TEXT
        for seed, length, size in product(seeds[: SEEDS[task]], LENGTHS[task], STATE_SIZES[task]):
            if length >= 16 or size <= 16:  # larger states fail at 16
                yield replace(of_task, state_size=size, length=length, seed=seed)


def families(results: Sequence[Result], task: str) -> Iterator[tuple[int, int, dict[int, Result]]]:
    """State size N, seed, and the results of a task by training length."""
    chosen = sorted((r for r in results if r["run"]["task"] == task), key=_place)
    for (size, seed), group in groupby(chosen, key=_place):
        yield size, seed, {result["run"]["length"]: result for result in group}


def _place(result: Result) -> tuple[int, int]:
    return result["run"]["state_size"], result["run"]["seed"]


def curve(result: Result) -> Curve:
    """Loss by position of a text model."""
    return Curve(tuple(result["edges"]), tuple(result["mean"]), None, None)


def accuracy(result: Result) -> dict[int, float]:
    """Length -> accuracy of a needle model."""
    return {int(length): share for length, share in result["accuracy"].items()}


def elements(results: Mapping[int, Result]) -> int:
    """State elements, which all training lengths share."""
    (count,) = {result["state_elements"] for result in results.values()}
    return int(count)


def forget(results: Sequence[Result]) -> tuple[Law, str]:
    """The law of T_forget, and the table of loss ratios."""
    thresholds, rows = [], []
    lengths = sorted(LENGTHS["text"])
    for size, seed, of_family in families(results, "text"):
        curves = {length: curve(result) for length, result in of_family.items()}
        thresholds.append(forget_threshold(elements(of_family), curves, skip=SKIP))
        ratios = [f"{loss_ratio(curves[n], n, SKIP):.2f}" if n in curves else "" for n in lengths]
        rows.append([str(size), f"{elements(of_family):,}", str(seed), *ratios, short(thresholds[-1])])
    law = fit_law("forget", thresholds, RULES["forget"], **UNITS)
    return law, markdown(["N", "state elements", "seed", *map(str, lengths), "T_forget"], rows)


def recall(results: Sequence[Result]) -> tuple[Law, str]:
    """The law of T_recall through the medians over seeds, and the table of all."""
    thresholds, rows = [], []
    for size, places in groupby(families(results, "needle"), key=itemgetter(0)):
        of_seeds = [(elements(runs), {n: accuracy(result) for n, result in runs.items()}) for _, _, runs in places]
        found = [recall_threshold(*each) for each in of_seeds]
        found.sort(key=lambda each: (each.relation != "<", each.length))  # models that did not learn the task first
        thresholds.append(found[(len(found) - 1) // 2])  # the lower of two middle ones, so that one model has it
        rows.append([str(size), f"{found[0].size:,}", ", ".join(map(short, found)), short(thresholds[-1])])
    law = fit_law("recall", thresholds, RULES["recall"], **UNITS)
    return law, markdown(["N", "state elements", "T_recall of each seed, sorted", "median"], rows)


def tables(results: Sequence[Result]) -> dict[str, str]:
    """The tables of the README by name."""
    parts = {"forget": forget(results), "recall": recall(results)}
    return {name: table for name, (_, table) in parts.items()} | {"laws": formulas([law for law, _ in parts.values()])}


def report(results: Sequence[Result], output: Path) -> None:
    """Files and tables of the results."""
    for name, (law, _) in (("forget", forget(results)), ("recall", recall(results))):
        write_result(output / f"{name}.json", law)
        save_png(law_figure(law), output / f"{name}.png")
    text = "\n".join(f"<!-- {name} -->\n{table}<!-- end -->\n" for name, table in tables(results).items())
    with replacing(output / "tables.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo-output/scaling_laws", help="folder for everything (%(default)s)")
    seeds = list(range(max(SEEDS.values())))
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds, help="in this order (0 to 7; of text, two)")
    parser.add_argument("--task", choices=LENGTHS, help="train only this task (both)")
    parser.add_argument("--report", action="store_true", help="train nothing, report on the results")
    parser.add_argument("--quick", action="store_true", help="sizes that show in seconds that the command works")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads are no faster at these sizes
    kept = ArmResults(Path(options.output), "runs")
    wanted = list(runs(["needle", "text"], options.seeds))
    if options.quick:
        wanted = [replace(run, **QUICK) for run in wanted if run.state_size <= 16 and run.length in (16, 64, 128)]
    asked = [] if options.report else [run for run in wanted if options.task in (None, run.task)]
    missing = [run for run in asked if result_of(run, kept) is None]
    for place, run in enumerate(missing, 1):
        print(f"[{place}/{len(missing)}] {run.label}: {trained(run, kept)['seconds']} s", flush=True)
    if options.report:
        kept.merge()
    results = [result for run in wanted if (result := result_of(run, kept)) is not None]
    if not {"text", "needle"} <= {result["run"]["task"] for result in results}:
        sys.exit(f"{options.output} has no run of both tasks yet: run without --report and --task.")
    report(results, Path(options.output))
