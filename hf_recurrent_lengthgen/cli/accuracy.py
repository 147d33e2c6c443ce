"""`lengthgen accuracy`: how many symbols checkpoints copy, recall or sort right, at the training length and beyond."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.inputs import make_output_folder
from hf_recurrent_lengthgen.cli.measuring import on_device
from hf_recurrent_lengthgen.cli.parsing import CommandParser, counts, positive
from hf_recurrent_lengthgen.cli.report import draw
from hf_recurrent_lengthgen.cli.shared_options import MODELS, add_shared
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, STRING_TASKS, TaskStrings, string_task
from hf_recurrent_lengthgen.evaluation.string_accuracy import StringAccuracy, accuracy_by_length
from hf_recurrent_lengthgen.evaluation.tables import write_csv
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.models.atomic_files import replacing
from hf_recurrent_lengthgen.plotting.accuracy import accuracy_figure
from hf_recurrent_lengthgen.versions import installed_versions

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
Curves = dict[str, dict[int, StringAccuracy]]


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
    if len(set(options.models)) < len(options.models):
        raise ValueError(f"Each model can be given once, got {' '.join(options.models)}.")
    models = [load_model(name, options.trust_remote_code, merge=True) for name in options.models]
    records = [getattr(model.config, "task", None) for model in models]
    task, training_length = _task(options, records)
    output = make_output_folder(options.output)
    found: Curves = {}
    for name, model in zip(options.models, models, strict=True):
        placed = on_device(model, options.device)
        pieces, seed = (options.batch_size, options.chunk_length), EVALUATION_SEED + options.seed
        found[name] = accuracy_by_length(placed, task, options.lengths, options.samples, pieces[0], seed, pieces[1])
    print(_table(found, task))
    print(f"\nResults: {_write(output, found, task, training_length, options)}")
    return 0


def _task(options: argparse.Namespace, records: Sequence[Any]) -> tuple[TaskStrings, int | None]:
    given = {"name": options.task, "length": options.task_length, "vocabulary": options.task_vocabulary}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) < 3:
        for model, found in zip(options.models, records, strict=True):
            _check_record(model, found)
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
    """Refuse a config's `task` that no training has written."""
    if record is None:
        return
    try:
        if not isinstance(record, Mapping) or set(record) != {"name", "length", "vocabulary"}:
            raise ValueError("it must have name, length and vocabulary, and nothing else")
        string_task(**record)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The config of {model} has the task {record!r}, which is damaged ({error}): set it right, or give "
            "--task, --task-length and --task-vocabulary."
        ) from error


def _words(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "no task that its config names"
    return f"{record['name']} with length {record['length']} and {record['vocabulary']} symbols"


def _table(found: Curves, task: TaskStrings) -> str:
    lengths = list(next(iter(found.values())))
    width = max(len("model"), *(len(name) for name in found))
    head = "".join(f"{length:>17,}" for length in lengths)
    rows = [
        name.ljust(width) + "".join(f"{pair.character:>9.3f}{pair.sequence:>8.3f}" for pair in curve.values())
        for name, curve in found.items()
    ]
    note = f"{task.name}, {task.vocabulary} symbols: share of right symbols, and of whole answers, by length."
    return "\n".join(["model".ljust(width) + head, *rows, note])


def _write(
    folder: Path, found: Curves, task: TaskStrings, training_length: int | None, options: argparse.Namespace
) -> Path:
    document = {
        "task": task.record | {"length": training_length},
        "samples": options.samples,
        "seed": options.seed,
        "versions": installed_versions(),
        "models": {
            name: {str(length): pair._asdict() for length, pair in curve.items()} for name, curve in found.items()
        },
    }
    with replacing(folder / "accuracy.json") as temporary:
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.csv:
        rows = [
            {"model": name, "length": length} | pair._asdict()
            for name, curve in found.items()
            for length, pair in curve.items()
        ]
        write_csv(folder / "accuracy.csv", rows)
    unit = "pairs" if task.name == "recall" else "symbols"
    short = {Path(name).name: curve for name, curve in found.items()}
    figure = accuracy_figure(short if len(short) == len(found) else found, unit, training_length)
    draw(figure, folder / "accuracy")
    return folder / "accuracy.png"
