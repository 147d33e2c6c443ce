"""`lengthgen retrieve`: long-range retrieval by depth and length."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent_lengthgen.cli.parsing import CommandParser, counts, in_columns, positive
from hf_recurrent_lengthgen.cli.shared_options import MODEL_OPTIONS, MODELS, add_shared, settings_of
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.plotting.names import short_names

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.data.tasks import BabiQuestion, RetrievalGrid
    from hf_recurrent_lengthgen.evaluation.results import DataSource
    from hf_recurrent_lengthgen.metrics import RetrievalResult
    from hf_recurrent_lengthgen.metrics.retrieval.result import Share

DESCRIPTION = """\
Measure long-range retrieval by depth and length of the text. An answer is correct if greedy decoding gives it. Writes
retrieval.json and figures. Tasks:

  passkey   a number of 5 digits in repeated sentences; --task-style takes the wording of Buitrago Ruiz & Gu, 2025 \
("pass key"), Chen et al., 2024 ("passkey") or Shen et al., 2025 ("infinity-bench")
  niah      a number of 7 digits in running text (NIAH-single-2 of RULER in the wording of Shen et al., 2025); the \
papers hide it in essays, this command in --data, from its beginning
  keys      a code of 5 digits of one of --task-keys names, each with --task-values codes, of which the last counts, \
between the sentences and lines of --data; wrong answers are counted by kind
  babilong  the questions qa1 to qa10 of bAbI, whose facts are spread through --data, at random places

Recurrent models read the common beginning of prompts once, so a second sample or depth costs less than a second text.
Results are cached by content: an interrupted command continues where it was. `lengthgen accuracy`
measures copying and the recall of many key-value pairs.
"""
EXAMPLES = """\
lengthgen retrieve demo-output/base demo-output/state-passing --lengths 1k,2k,4k
lengthgen retrieve my-mamba2 --task niah --lengths 4k,8k,16k,32k --data essays --split train
lengthgen retrieve my-mamba2 --task keys --task-keys 2 --task-values 2 --lengths 1k,4k,16k --data essays
lengthgen retrieve my-mamba2 --task babilong --task-files tasks_1-20_v1-2/en-10k --shots 2
"""
TASKS = ("passkey", "niah", "keys", "babilong")


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen retrieve", DESCRIPTION, EXAMPLES, method="task")
    add = parser.method.add_argument
    parser.model.add_argument("models", **MODELS)
    add_shared(parser, "--data", "--split", "--text-column")
    for action in parser.data._group_actions:
        action.help += " [task niah or keys or babilong]"
    add("--task", choices=TASKS, default=TASKS[0], help="see above (default: %(default)s)")
    what = "tokens of prompt and answer; 1k is 1024 (default: %(default)s)"
    add("--lengths", type=counts, default="1k,2k,4k,8k,16k", metavar="N,...", help=what)
    add(
        "--depths",
        type=_depths,
        metavar="N | X,...",
        help="number n of depths, which are 0 (start of the text), 1/n, ..., (n - 1)/n, as in Chen et al. (2024), "
        "B.1, or the depths themselves, up to 1 (end of the text, the easiest); (default: 10) "
        "[task passkey or niah or keys]",
    )
    add("--samples", type=positive, default=10, metavar="N", help="prompts in each cell (default: %(default)s)")
    styles = ("pass key", "passkey", "infinity-bench")
    what = "wording of the prompt (default: %(default)s) [task passkey]"
    add("--task-style", choices=styles, default=styles[0], help=what)
    what = "number of names with codes in a prompt; the question names one (default: %(default)s) [task keys]"
    add("--task-keys", type=positive, default=4, metavar="N", help=what)
    what = "number of codes of each name; the last one counts (default: %(default)s) [task keys]"
    add("--task-values", type=positive, default=1, metavar="N", help=what)
    add(
        "--task-files",
        metavar="FOLDER",
        help="required: folder with the files of bAbI, qa1_..._test.txt and so on; --shots also needs "
        "qa1_..._train.txt [task babilong]",
    )
    what = "which questions of bAbI (default: 1,2,3,4,5,6,7,8,9,10) [task babilong]"
    add("--babi-tasks", type=counts, default=list(range(1, 11)), metavar="N,...", help=what)
    what = "solved examples before a prompt (default: %(default)s) [task babilong]"
    add("--shots", type=int, default=0, metavar="N", help=what)
    run_options = "--output", "--csv", "--batch-size", "--chunk-length", "--seed"
    add_shared(parser, *MODEL_OPTIONS, *run_options, output="retrieval")
    return parser


def run(arguments: Sequence[str]) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    from hf_recurrent_lengthgen.cli.inputs import check_distinct, token_unit
    from hf_recurrent_lengthgen.cli.measuring import load_models, model_label, on_device, open_cache, shared_tokenizer
    from hf_recurrent_lengthgen.evaluation.results import DataRecord
    from hf_recurrent_lengthgen.metrics import RetrievalComparison, retrieval_accuracy
    from hf_recurrent_lengthgen.metrics.tables import update_csv

    if options.task == "babilong" and options.task_files is None:
        parser.error("--task babilong needs --task-files, the folder with the files of bAbI")
    check_distinct(options.models)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer, cache = shared_tokenizer(options), open_cache(options)
    grid, source = _grid(options, tokenizer)
    data = DataRecord(source, token_unit=token_unit(tokenizer))
    settings = settings_of(EvaluationSettings, options, ["lengthgen", "retrieve", *arguments])
    models = load_models(options, options.attention_window)
    results = []
    for name, model in zip(short_names(options.models), models, strict=True):
        rows = f"{len(grid.rows)} {'tasks' if grid.depths is None else 'depths'}"
        print(f"{grid.task}, {rows} x {len(options.lengths)} lengths x {grid.samples} samples: {name}")
        placed, label = on_device(model, options.device), model_label(name, model)
        about = label, data, options.training_length or getattr(model.config, "training_length", None)
        results.append(retrieval_accuracy(placed, grid, options.lengths, *about, settings, cache=cache))
    print(f"\n{_table(results)}")
    written = _write(output, results)
    update_csv(output / "retrieval.csv", RetrievalComparison(tuple(results)), options.csv)
    print(f"\nResults: {', '.join(map(str, written))}")
    return 0


def _depths(text: str) -> list[float]:
    """Depths from 0 to 1, from a number n of depths i/n or one by one."""
    if text.isdecimal() and int(text) > 1:
        return [round(index / int(text), 6) for index in range(int(text))]
    depths = [float(part) for part in text.split(",")]
    if not all(0 <= depth <= 1 for depth in depths):
        raise argparse.ArgumentTypeError(f"must be a number of depths, or depths from 0 to 1, got {text}")
    return depths


def _grid(options: argparse.Namespace, tokenizer: Any) -> "tuple[RetrievalGrid, DataSource]":
    from hf_recurrent_lengthgen.cli.inputs import chosen_split, data_source, load_documents
    from hf_recurrent_lengthgen.data import tasks, token_stream
    from hf_recurrent_lengthgen.evaluation.results import DataSource

    sizes = {"samples": options.samples, "seed": options.seed}
    depths = options.depths or tasks.DEPTHS
    if options.task == "passkey":
        passkeys = tasks.PasskeyGrid(tokenizer, depths, style=options.task_style, **sizes)
        return passkeys, DataSource("repeated sentences")
    split = chosen_split(options.data, options.split, "validation")
    texts = load_documents(options.data, split, options.text_column)
    source = data_source(options.data, split)
    if options.task == "niah":
        return tasks.NeedleGrid(tokenizer, texts, depths, **sizes), source
    if options.task == "keys":
        numbers = {"keys": options.task_keys, "values": options.task_values}
        return tasks.KeyGrid(tokenizer, token_stream(texts, tokenizer), depths, **sizes, **numbers), source

    def questions(part: str) -> "dict[str, list[BabiQuestion]]":
        files = tasks.babi_files(options.task_files, part, options.babi_tasks)
        return {f"qa{task}": tasks.read_babi(path) for task, path in zip(options.babi_tasks, files, strict=True)}

    examples = questions("train") if options.shots > 0 else None
    grid = tasks.BabilongGrid(tokenizer, questions("test"), texts, shots=options.shots, examples=examples, **sizes)
    return grid, replace(source, name=f"bAbI in {source.name}")


def _table(results: "Sequence[RetrievalResult]") -> str:
    from hf_recurrent_lengthgen.plotting.style import short_number

    first = results[0]
    head = [short_number(length) for length in first.lengths]
    rows = [["model", *head, "T_recall"]]
    for result in results:
        recalled = result.recall_length()
        cells = (_percent(share, result.confidence) for share in result.by_length)
        rows.append([result.model, *cells, "none" if recalled is None else short_number(recalled)])
    what = f"{first.task} ({first.style}{f', {first.shots} shots' if first.shots else ''})"
    note = (
        f"{what}: right answers in percent by length in {first.data.token_unit}s, with 95 % intervals;\n"
        "T_recall (Chen et al., 2024) is the length up to which at least 95 % are right."
    )
    if any(not cell.samples for row in first.cells for cell in row):
        note += " Cells without samples, where no question fits, do not count."
    kinds = [["model", *head, "kind of wrong answer"]]
    kinds += [[one.model, *map(str, by), kind] for one in results for kind, by in one.mistakes_by_length.items()]
    return "\n".join([in_columns(rows), note, *(["", in_columns(kinds)] if kinds[1:] else [])])


def _percent(share: "Share", confidence: float) -> str:
    if share.accuracy is None:
        return "-"
    low, high = share.interval(confidence)
    return f"{100 * share.accuracy:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def _write(folder: Path, results: "Sequence[RetrievalResult]") -> list[Path]:
    """Write JSON and pictures; returns the paths of the JSON file and of the PNGs."""
    from hf_recurrent_lengthgen.cli.report import draw
    from hf_recurrent_lengthgen.evaluation.files import write_result
    from hf_recurrent_lengthgen.metrics import RetrievalComparison
    from hf_recurrent_lengthgen.metrics.retrieval import figure

    figures = {"heat_map": figure.heat_map_figure(results), "accuracy": figure.retrieval_accuracy_figure(results)}
    if results[0].mistakes_by_length:
        figures["mistakes"] = figure.mistakes_figure(results)
    write_result(folder / "retrieval.json", RetrievalComparison(tuple(results)))
    for name, drawn in figures.items():
        draw(drawn, folder / name)
    return [folder / "retrieval.json", *(folder / f"{name}.png" for name in figures)]
