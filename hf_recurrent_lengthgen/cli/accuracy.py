"""`lengthgen accuracy`: how many symbols models copy, recall or sort right, at the training length and beyond."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.cli.inputs import check_given_once, make_output_folder
from hf_recurrent_lengthgen.cli.measuring import model_label, on_device
from hf_recurrent_lengthgen.cli.parsing import CommandParser, counts, positive
from hf_recurrent_lengthgen.cli.report import draw
from hf_recurrent_lengthgen.cli.shared_options import MODELS, add_shared
from hf_recurrent_lengthgen.data.tasks import STRING_TASKS, TaskStrings, string_task
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.accuracy.figure import accuracy_figure
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyComparison
from hf_recurrent_lengthgen.metrics.tables import rows_of, write_csv
from hf_recurrent_lengthgen.plotting.names import short_names

DESCRIPTION = """\
Measure how many symbols models copy, recall or sort right, as in "Mimetic initialization" (Trockman et al., 2024): of
all symbols, and of whole answers by greedy decoding. Checkpoints of `lengthgen train --task copying` and the like know
their task. Writes accuracy.json, accuracy.png and accuracy.svg.
"""
EXAMPLES = """\
lengthgen accuracy copier
lengthgen accuracy copier other-copier --lengths 50,100,200,300 --samples 1000
lengthgen accuracy my-mamba2 --task recall --task-length 16 --task-vocabulary 256
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen accuracy", DESCRIPTION, EXAMPLES, method="task")
    parser.model.add_argument("models", **MODELS)
    add = parser.method.add_argument
    add("--task", choices=STRING_TASKS, help="what the models do (default: from the config of the first)")
    lengths = "lengths of strings; pairs with recall (default: 1, 2 and 4 times the longest in training)"
    add("--lengths", type=counts, metavar="N,...", help=lengths)
    add("--samples", type=positive, default=256, metavar="N", help="strings of each length (default: %(default)s)")
    longest = "longest string in training (default: from the config)"
    add("--task-length", type=positive, metavar="N", help=longest)
    add("--task-vocabulary", type=positive, metavar="N", help="number of symbols (default: from the config)")
    run_options = "--csv", "--device", "--batch-size", "--chunk-length", "--seed", "--trust-remote-code"
    add_shared(parser, "--output", *run_options, output="accuracy")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    check_given_once(options.models)
    models = [load_model(name, options.trust_remote_code, merge=True) for name in options.models]
    records = [getattr(model.config, "task", None) for model in models]
    task, training_length = _task(options, records)
    output = make_output_folder(options.output)
    settings = EvaluationSettings(
        options.batch_size,
        options.chunk_length,
        seed=options.seed,
        command=shlex.join(["lengthgen", "accuracy", *arguments]),
    )
    results = []
    for name, model in zip(short_names(options.models), models, strict=True):
        placed, label = on_device(model, options.device), model_label(name, model.config)
        results.append(
            measure_accuracy(placed, task, options.lengths, label, training_length, settings, samples=options.samples)
        )
    comparison = AccuracyComparison(tuple(results))
    print(_table(comparison))
    print(f"\nResults: {_write(output, comparison, options.csv)}")
    return 0


def _task(options: argparse.Namespace, records: Sequence[Any]) -> tuple[TaskStrings, int | None]:
    given = {"name": options.task, "length": options.task_length, "vocabulary": options.task_vocabulary}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) < 3:
        for model, written in zip(options.models, records, strict=True):
            _check_record(model, written)
    record = dict(records[0] or {}) if len(given) < 3 else {}
    if given.get("name") not in (None, record.get("name")):
        record = {}  # lengths and symbols of another task say nothing about this one
    for model, other in zip(options.models[1:], records[1:], strict=True):
        if other != records[0] and len(given) < 3:
            raise ValueError(
                f"{options.models[0]} was trained on {_words(records[0])}, {model} on {_words(other)}: measure them "
                "one by one, or give --task, --task-length and --task-vocabulary."
            )
    record |= given
    if "name" not in record:
        raise ValueError(f"The config of {options.models[0]} names no task: give --task.")
    length_is_known = record.get("length") is not None
    if not length_is_known:
        if not options.lengths:
            raise ValueError(
                f"The longest string in the training of {options.models[0]} is not known: give --lengths."
            )
        record["length"] = min(options.lengths)
    task = string_task(**record)
    return task, task.longest if length_is_known else None


def _check_record(model: str, record: Any) -> None:
    """Raise a `ValueError` for a `task` in a config that no training has written."""
    if record is None:
        return
    try:
        if not isinstance(record, Mapping) or set(record) != {"name", "length", "vocabulary"}:
            raise ValueError("it must have name, length and vocabulary, and nothing else")
        string_task(**record)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The config of {model} has the task {record!r}, which is damaged ({error}): correct it, or give "
            "--task, --task-length and --task-vocabulary."
        ) from error


def _words(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "no task that its config names"
    return f"{record['name']} with length {record['length']} and {record['vocabulary']} symbols"


def _table(comparison: AccuracyComparison) -> str:
    first = comparison.models[0]
    width = max(len("model"), *(len(result.model) for result in comparison.models))
    head = "".join(f"{each.length:>17,}" for each in first.lengths)
    rows = [
        result.model.ljust(width) + "".join(f"{symbols:>9.3f}{answers:>8.3f}" for symbols, answers in curve.values())
        for result, curve in zip(comparison.models, _curves(comparison).values(), strict=True)
    ]
    note = f"{first.task}, {first.vocabulary} symbols: share of right symbols, and of whole answers, by length."
    return "\n".join(["model".ljust(width) + head, *rows, note])


def _curves(comparison: AccuracyComparison) -> dict[str, dict[int, tuple[float, float]]]:
    """Model -> length -> share of right symbols, and of right answers."""
    return {
        result.model: {
            each.length: (each.symbols.accuracy or 0.0, each.answers.accuracy or 0.0) for each in result.lengths
        }
        for result in comparison.models
    }


def _write(folder: Path, comparison: AccuracyComparison, csv: bool) -> Path:
    """Write JSON, table and picture; returns the path of the picture."""
    write_result(folder / "accuracy.json", comparison)
    if csv:
        write_csv(folder / "accuracy.csv", rows_of(comparison))
    first = comparison.models[0]
    unit = "pairs" if first.task == "recall" else "symbols"
    draw(accuracy_figure(_curves(comparison), unit, first.training_length), folder / "accuracy")
    return folder / "accuracy.png"
