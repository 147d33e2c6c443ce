"""What a learned initial state can learn, compared with LoRA with as many parameters, on a small checkpoint.

Three kinds of tasks for the Mamba-2 of `model_cards/mamba2-base`, trained on bytes of Python source: a format (every
line is a comment), another alphabet (upper case), and facts (arbitrary pairs of four letters, all of which are trained
and tested). The learning rate of each method and task is the better of two on a seed that is not reported. Results go
to results.jsonl in this folder, and an interrupted run continues; then table and figure are written.

    python examples/learned_state/run.py           # all, about 20 minutes on one core
    python examples/learned_state/run.py --report  # table and figure only
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.adapters import add_adapter
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    LearnedStateConfig,
    LearnedStateTrainer,
    ZeroStateTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arm_results import ArmResults
from study_pages import fill

HERE = Path(__file__).resolve().parent

BASE = HERE.parents[1] / "model_cards" / "mamba2-base"
STYLES = {"comments": "every line is a comment", "upper case": "all letters are upper case"}
FACTS = (16, 64, 256)
RATES = {"learned state": (0.03, 0.1), "LoRA": (0.003, 0.01)}
RANK, LENGTH, SEEDS, TUNING_SEED = 8, 128, (0, 1, 2), 100
STEPS = {"style": 150, "facts": 500}
ROWS = {"style": 8, "facts": 32}


def in_style(text: str, style: str) -> str:
    """A text in one of the styles."""
    if style == "upper case":
        return text.upper()
    return "".join(f"# {line}" for line in text.splitlines(keepends=True))


def style_ids(style: str, split: str, rows: int) -> Tensor:
    """Token ids (rows, T + 1) of texts in a style."""
    texts = (in_style(text, style) for text in standard_library_corpus().texts(split))
    stream = token_stream(texts, byte_tokenizer())
    return torch.as_tensor(evaluation_sequences(stream, rows, LENGTH + 1)).long()


def facts_ids(number: int, seed: int) -> Tensor:
    """`number` sequences "abcd=wxyz" of different random keys and random values, as token ids (number, 9)."""
    generator = np.random.default_rng(seed)
    words: list[str] = []
    while len(words) < number:
        words += {"".join(generator.choice(list("abcdefghijklmnopqrstuvwxyz"), 4))} - {*words}
    values = ["".join(generator.choice(list("abcdefghijklmnopqrstuvwxyz"), 4)) for _ in words]
    rows = [f"{word}={value}" for word, value in zip(words, values, strict=True)]
    return torch.tensor([byte_tokenizer()(row, add_special_tokens=False)["input_ids"] for row in rows])


def examples(task: str, seed: int, steps: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Training sequences, and the ids on which the task is measured."""
    if task in STYLES:
        ids = style_ids(task, "train", min(steps * ROWS["style"], 4000))
        return [{"input_ids": row, "labels": row} for row in ids], style_ids(task, "validation", 64)
    ids = facts_ids(int(task.partition(" ")[0]), seed)
    labels = ids.clone()
    labels[:, :5] = -100  # only values are scored
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)], ids


@torch.no_grad()
def measure(model: Any, task: str, ids: Tensor) -> float:
    """Loss in nats per byte in a style; share of facts whose four letters are all predicted."""
    model.eval()
    logits = model(ids[:, :-1]).logits
    if task in STYLES:
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    return float((logits.argmax(-1)[:, 4:] == ids[:, 5:]).all(1).float().mean())


def run(method: str, task: str, seed: int, rate: float, steps: int) -> dict[str, Any]:
    """Train one method on one task, and measure it."""
    torch.manual_seed(seed)
    kind = "style" if task in STYLES else "facts"
    model = load_model(str(BASE))
    rows, ids = examples(task, seed, steps)
    before = measure(model, task, ids)
    trainer_class: Any = LearnedStateTrainer
    config: Any = LearnedStateConfig
    if method == "LoRA":
        model, trainer_class, config = add_adapter(model, RANK, 2 * RANK), ZeroStateTrainer, InitialStateConfig
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            folder,
            max_steps=steps,
            per_device_train_batch_size=min(ROWS[kind], len(rows)),
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            weight_decay=0.0,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer_class(model, arguments, train_dataset=rows).train()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds = time.monotonic() - began
    return {"before": before, "after": measure(model, task, ids), "parameters": trained, "seconds": round(seconds, 1)}


def train(kept: ArmResults, tasks: Sequence[str], seeds: Sequence[int], shorter: int) -> None:
    """All runs that have no result yet; steps are divided by `shorter`."""

    def after(method: str, task: str, seed: int, rate: float) -> float:
        arm = f"{task}/{method}/{rate:g}"
        result = kept.get(arm, seed)
        if result is None:
            steps = STEPS["style" if task in STYLES else "facts"] // shorter
            result = {"rate": rate} | run(method, task, seed, rate, steps)
            kept.put(arm, seed, result)
            print(f"{arm}, seed {seed}: {result['before']:.3f} -> {result['after']:.3f}", flush=True)
        return float(result["after"])

    for task in tasks:
        for method, rates in RATES.items():
            results = {rate: after(method, task, TUNING_SEED, rate) for rate in rates}
            best = min(results, key=results.__getitem__) if task in STYLES else max(results, key=results.__getitem__)
            for seed in seeds:
                after(method, task, seed, best)


def of(kept: ArmResults, task: str, method: str, field: str) -> list[float]:
    """A field of all reported runs of a task and method."""
    arms = [place for place in kept.arms() if place[0].startswith(f"{task}/{method}/") and place[1] != TUNING_SEED]
    return [result[field] for place in arms if (result := kept.get(*place)) is not None]


def spread(values: Sequence[float], form: str) -> str:
    """Mean and range."""
    low, high = min(values), max(values)
    mean = format(statistics.mean(values), form)
    return mean if low == high else f"{mean} ({low:{form}} to {high:{form}})"


def table(kept: ArmResults, tasks: Sequence[str]) -> str:
    """Markdown with one row per task."""
    lines = ["| task | measure | base | learned state | LoRA | learning rates |", "|---|---|---|---|---|---|"]
    for task in tasks:
        style = task in STYLES
        form, what = (".3f", "nats per byte") if style else (".0%", "values recalled")
        name = f"{task}: {STYLES[task]}" if style else task
        cells = [spread(of(kept, task, method, "after"), form) for method in RATES]
        rates = ", ".join(f"{of(kept, task, method, 'rate')[0]:g}" for method in RATES)
        base = spread(of(kept, task, "learned state", "before"), form)
        lines.append(f"| {name} | {what} | {base} | {' | '.join(cells)} | {rates} |")
    return "\n".join(lines) + "\n"


def draw(kept: ArmResults, tasks: Sequence[str]) -> Figure:
    """Loss in the styles, and recall of facts by their number."""
    styles, facts = [task for task in tasks if task in STYLES], [task for task in tasks if task not in STYLES]
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = {"base": "0.7", "learned state": "C0", "LoRA": "C1"}
    for place, (name, color) in enumerate(colors.items()):
        runs = [
            of(kept, task, "LoRA" if name == "base" else name, "before" if name == "base" else "after")
            for task in styles
        ]
        x = [number + (place - 1) * 0.27 for number in range(len(styles))]
        left.bar(x, [statistics.mean(values) for values in runs], 0.25, color=color, label=name)
        for at, values in zip(x, runs, strict=True):
            left.plot([at] * len(values), values, "k.", markersize=3)
    left.set_xticks(range(len(styles)), styles)
    left.set_ylabel("loss (nats per byte)")
    left.set_title("styles (lower is better)", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    numbers = [int(task.partition(" ")[0]) for task in facts]
    for name in RATES:
        runs = [of(kept, task, name, "after") for task in facts]
        right.plot(numbers, [statistics.mean(values) for values in runs], "o-", color=colors[name], label=name)
        right.fill_between(numbers, [min(v) for v in runs], [max(v) for v in runs], color=colors[name], alpha=0.2)
    right.set_xscale("log", base=2)
    right.set_xticks(numbers, [str(number) for number in numbers])
    right.set_ylim(-0.03, 1.03)
    right.set_xlabel("number of facts")
    right.set_ylabel("share of facts recalled")
    right.set_title("facts (higher is better)", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder with README.md, results and figure")
    parser.add_argument("--report", action="store_true", help="write table and figure from the results")
    parser.add_argument("--tiny", action="store_true", help="one style, 16 facts, one seed, hundredths of the steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tasks = [*STYLES, *(f"{number} facts" for number in FACTS)]
    if options.tiny:
        tasks = tasks[len(STYLES) - 1 : len(STYLES) + 1]
    kept = ArmResults(options.output, "results")
    if not options.report:
        train(kept, tasks, SEEDS[:1] if options.tiny else SEEDS, 100 if options.tiny else 1)
    kept.merge()
    fill(options.output / "README.md", {"table": table(kept, tasks)})
    save_png(draw(kept, tasks), options.output / "learned_state.png")


if __name__ == "__main__":
    main()
