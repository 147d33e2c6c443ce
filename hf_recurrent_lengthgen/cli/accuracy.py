"""`lengthgen accuracy`: accuracy of copying, recall and sorting, at the training length and beyond."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, counts, in_columns, positive
from hf_recurrent_lengthgen.cli.shared_options import MODELS, add_shared, settings_of
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.plotting.names import short_names

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.metrics import AccuracyComparison

DESCRIPTION = """\
Measure the accuracy of copying, recall and sorting, as in "Mimetic initialization" (Trockman et al., 2024): of
all symbols, and of whole answers by greedy decoding. Models are checkpoints of `lengthgen train --task copying` and
the like, whose config names the task. Writes accuracy.json, accuracy.png and accuracy.svg: accuracy by length, or over
the steps of training if all models are folders checkpoint-N, at least two of one run.
"""
EXAMPLES = """\
lengthgen accuracy copier
lengthgen accuracy copier other-copier --lengths 50,100,200,300 --samples 1000
lengthgen accuracy copier/checkpoint-* other-copier/checkpoint-* --lengths 50,100
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen accuracy", DESCRIPTION, EXAMPLES, method="task")
    parser.model.add_argument("models", **MODELS)
    add = parser.method.add_argument
    lengths = "lengths of strings; pairs with recall (default: the longest in training, twice and four times that)"
    add("--lengths", type=counts, metavar="N,...", help=lengths)
    add("--samples", type=positive, default=256, metavar="N", help="strings of each length (default: %(default)s)")
    run_options = "--csv", "--device", "--batch-size", "--chunk-length", "--seed", "--import", "--trust-remote-code"
    add_shared(parser, "--attention-window", "--output", *run_options, output="accuracy")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.loading import load_model
    from hf_recurrent_lengthgen.cli.inputs import check_distinct
    from hf_recurrent_lengthgen.cli.measuring import model_label, on_device, task_of
    from hf_recurrent_lengthgen.metrics import AccuracyComparison, measure_accuracy

    check_distinct(options.models)
    runs = _runs(options.models)
    names = [name for steps in runs.values() for name in steps.values()] or options.models
    how: dict[str, Any] = {"merge": True, "attention_window": options.attention_window}
    models = [load_model(name, options.trust_remote_code, **how) for name in names]
    task = task_of(names, models)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    settings = settings_of(EvaluationSettings, options, ["lengthgen", "accuracy", *arguments])
    settings = replace(settings, seed=options.seed)
    results = []
    for name, model in zip(short_names(names), models, strict=True):
        placed, about = on_device(model, options.device), (model_label(name, model), task.longest, settings)
        results.append(measure_accuracy(placed, task, options.lengths, *about, samples=options.samples))
    comparison = AccuracyComparison(tuple(results))
    print(_table(comparison))
    print(f"\nResults: {_write(output, comparison, options.csv, runs)}")
    return 0


def _runs(models: Sequence[str]) -> dict[str, dict[int, str]]:
    """Run -> step -> model, with ascending steps.

    Empty unless all models are folders checkpoint-N, and at least two of one run.
    """
    runs: dict[str, dict[int, str]] = {}
    for name in models:
        path = Path(name).resolve()
        step = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if step is None:
            return {}
        runs.setdefault(str(path.parent), {})[int(step[1])] = name
    if len(runs) == len(models):
        return {}
    return {name: dict(sorted(run.items())) for name, run in zip(short_names([*runs]), runs.values(), strict=True)}


def _table(comparison: "AccuracyComparison") -> str:
    first, curves = comparison.models[0], _curves(comparison)
    rows = [["model", *(f"{each.length:,}" for each in first.lengths)]]
    rows += [[model, *(f"{a:.3f} {b:.3f}" for a, b in curve.values())] for model, curve in curves.items()]
    note = f"{first.task}, {first.vocabulary} symbols: share of right symbols, and of whole answers, by length."
    return f"{in_columns(rows)}\n{note}"


def _curves(comparison: "AccuracyComparison") -> dict[str, dict[int, tuple[float, float]]]:
    """Model -> length -> share of right symbols, and of right answers."""
    return {
        result.model: {
            each.length: (each.symbols.accuracy or 0.0, each.answers.accuracy or 0.0) for each in result.lengths
        }
        for result in comparison.models
    }


def _write(folder: Path, comparison: "AccuracyComparison", csv: bool, runs: Mapping[str, Iterable[int]]) -> Path:
    """Write JSON, table and picture; returns the path of the picture."""
    from hf_recurrent_lengthgen.cli.report import draw
    from hf_recurrent_lengthgen.evaluation.files import write_result
    from hf_recurrent_lengthgen.metrics.accuracy.figure import accuracy_figure, accuracy_over_steps_figure
    from hf_recurrent_lengthgen.metrics.tables import update_csv

    write_result(folder / "accuracy.json", comparison)
    update_csv(folder / "accuracy.csv", comparison, csv)
    first, curves = comparison.models[0], _curves(comparison)
    unit = "pairs" if first.task == "recall" else "symbols"
    by_symbol = ({length: symbols for length, (symbols, _) in curve.items()} for curve in curves.values())
    if over_steps := {run: {step: next(by_symbol) for step in steps} for run, steps in runs.items()}:
        figure = accuracy_over_steps_figure(over_steps, unit)
    else:
        figure = accuracy_figure(curves, unit, first.training_length)
    draw(figure, folder / "accuracy")
    return folder / "accuracy.png"
