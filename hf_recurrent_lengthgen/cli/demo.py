"""`lengthgen demo`: a small model fails beyond its training length, state passing cures it, plain training does not.

The second act goes on from a model that finds keys inside its training length: long prompts, in pieces, let it find
them far beyond.

The base model is DeltaNet on bytes, with rates of up to 2 (Grazzi et al., 2025, arXiv:2411.12537) and fla's own start:
the delta rule has no decay, so its states leave those of training as soon as texts get longer. Everything is trained
from scratch on text that every machine has, the source files of the Python standard library.
"""

import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent_lengthgen.cli import evaluate, retrieve
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_shared

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.metrics import Comparison
    from hf_recurrent_lengthgen.models import StatefulDeltaNetConfig


@dataclass(frozen=True)
class Budget:
    """Lengths in tokens (bytes), steps and texts; `evaluation_multiple` is in training lengths."""

    training_length: int = 128
    batch_size: int = 16
    base_steps: int = 600
    base_learning_rate: float = 4e-3
    cure_steps: int = 200
    cure_learning_rate: float = 2.5e-3
    state_drop_probability: float = 0.1
    evaluation_multiple: int = 64
    sequences: int = 16


@dataclass(frozen=True)
class DemoSettings(Budget):
    """Sizes and budgets of the demo."""

    hidden_size: int = 96
    num_heads: int = 3
    num_layers: int = 2


@dataclass(frozen=True)
class MemoryBudget:
    """Steps of `rows` prompts of 1 to `pieces` training lengths; asked at `multiples` of it, `samples` a depth."""

    rows: int = 8
    pieces: int = 16
    steps: int = 300
    learning_rate: float = 1e-3
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    samples: int = 2


DEFAULTS = DemoSettings()
MEMORY = MemoryBudget()
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
START = "start.json"
ROLES = ("base", "cured", "control")
FAR_ROLES, KEYS = ("far", "far-control"), "keys"
MEMORY_BASE = Path("model_cards/passkey-base")
DESCRIPTION = """\
Train a small DeltaNet on the sources of the Python standard library, see it fail beyond its training length, cure it
with state passing, and compare with equally many plain steps. Then, in a clone of the repository, train a model that
finds keys in 128 words until it finds them far beyond. Takes 3 to 6 minutes on two cores and downloads nothing. The
output folder holds:

  index.html   page with figures and numbers: open it in a browser
  result.json  the numbers; tables.md, and position_wise, context_harm and in_window as .png and .svg
  start.json   the config of the model, from which the commands that are printed train it
  base/        the model that fails; with cured/ and control/ a checkpoint that loads with trust_remote_code=True
  far/         the model that finds keys far back; far-control/ took as many plain steps, keys/ has what both find
"""
EXAMPLES = """\
lengthgen demo
lengthgen demo --output second-demo --seed 1
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen demo", DESCRIPTION, EXAMPLES)
    add_shared(parser, "--output", "--seed", output="demo-output")
    parser.run.add_argument(
        "--memory-base",
        default=str(MEMORY_BASE) if MEMORY_BASE.is_dir() else None,
        metavar="FOLDER",
        help="checkpoint that finds keys inside its training length, for the second act, or none for no second act "
        f"(default: {MEMORY_BASE}, which a clone of the repository has; elsewhere none)",
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    base = None if options.memory_base in (None, "none") else Path(options.memory_base)
    run_demo(Path(options.output), options.seed, base)
    return 0


def run_demo(
    output: Path,
    seed: int = 0,
    memory_base: Path | None = None,
    settings: DemoSettings = DEFAULTS,
    memory: MemoryBudget = MEMORY,
) -> "Comparison":
    """Train base, cured and control, evaluate them on the same held-out text, and write the report.

    With `memory_base`, a checkpoint folder, two more are trained from it and asked for keys (`memory_stages`).

    Writes `base/`, `cured/`, `control/` (checkpoints with code), `result.json`, figures and `index.html`; for the
    second act also `far/`, `far-control/` and `keys/`.

    Raises:
        ValueError: if a folder of a checkpoint holds files that no demo wrote, which are not overwritten.
    """
    from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
    from hf_recurrent_lengthgen.cli import train
    from hf_recurrent_lengthgen.cli.report import summary_table, write_report
    from hf_recurrent_lengthgen.data import byte_tokenizer

    began = time.perf_counter()
    stages = harm_stages(output, settings)
    if memory_base is not None:
        stages |= memory_stages(memory_base, output, memory)
    for folder in (output / role for role in (*ROLES, *FAR_ROLES)):
        if folder.is_dir() and any(folder.iterdir()) and not (output / START).is_file():
            raise ValueError(f"{folder} holds files that no demo wrote: give another --output.")
        shutil.rmtree(folder, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    base_config(settings, len(byte_tokenizer())).to_json_file(output / START)
    with quiet_transformers():
        for number, (what, line) in enumerate(stages.items(), 1):
            command, *words = shlex.split(f"{line} --seed {seed}" if line.startswith("train ") else line)
            print(f"\n[{number}/{len(stages)}] {what}\n  lengthgen {shlex.join([command, *words])}", flush=True)
            if command == "evaluate":
                comparison, _ = evaluate.compare(evaluate.command_parser().parse_args(words), words)
                page = write_report(comparison, output, checkpoint=output / "cured")  # kept if the second act fails
                print(f"\n{summary_table(comparison)}")
            else:
                {"train": train.run, "retrieve": retrieve.run}[command](words)
    if memory_base is None:
        print(f"\nNo second act, far memory: it needs --memory-base, such as the repository's {MEMORY_BASE}.")
    else:
        page = write_report(comparison, output, output / "cured", memory_section(output / KEYS))
    print(f"\nTotal: {time.perf_counter() - began:.0f} s. Page with figures: {page}")
    return comparison


def harm_stages(output: Path, settings: DemoSettings) -> dict[str, str]:
    """The commands of the first act, by what they do: base, cure, control, and the evaluation of all three."""
    start, base, cured, control = (shlex.quote(str(output / name)) for name in (START, *ROLES))
    length, texts = settings.evaluation_multiple * settings.training_length, settings.sequences
    rows = f"--training-length {settings.training_length} --per-device-train-batch-size {settings.batch_size}"
    train = f"{_steps(settings.base_steps, settings.base_learning_rate)} {rows}"
    cure = f"{_steps(settings.cure_steps, settings.cure_learning_rate)} {rows}"
    passing = f"--intervention state_passing --state-drop-probability {settings.state_drop_probability}"
    return {
        f"Training a model from scratch on {settings.training_length}-byte pieces of text": (
            f"train --model {start} --output {base} --intervention none {train}"
        ),
        "Curing it: a few more steps with state passing": f"train --model {base} --output {cured} {passing} {cure}",
        "Control: equally many plain steps": f"train --model {base} --output {control} --intervention none {cure}",
        f"Evaluating all three on {texts} held-out texts of {length:,} bytes": (
            f"evaluate {base} {cured} {control} --roles {','.join(ROLES)} --length {length} --sequences {texts} "
            f"--output {shlex.quote(str(output))} --no-cache"
        ),
    }


def memory_stages(base: Path, output: Path, budget: MemoryBudget) -> dict[str, str]:
    """The commands of the second act, by what they do: keys in long prompts, a control in short ones, both asked.

    Raises:
        ValueError: if `base` is a checkpoint that this demo would overwrite.
    """
    from hf_recurrent_lengthgen.checkpoints.records import read_json_object

    if base.resolve() in [(output / role).resolve() for role in (*ROLES, *FAR_ROLES)]:
        raise ValueError(f"This demo would overwrite --memory-base {base}: give another --output.")
    length = read_json_object(base / "config.json")["training_length"]
    start = shlex.quote(str(base))
    far, control, keys = (shlex.quote(str(output / name)) for name in (*FAR_ROLES, KEYS))
    longest, lengths = budget.pieces * length, ",".join(str(length * multiple) for multiple in budget.multiples)
    rows = f"--task passkey --training-length {length} --per-device-train-batch-size {budget.rows}"
    common = f"{rows} {_steps(budget.steps, budget.learning_rate)}"
    return {
        f"Far memory: from keys in {length} words to keys in up to {longest:,}, read in pieces": (
            f"train --model {start} --output {far} --intervention tbtt --task-length {length}-{longest} {common}"
        ),
        f"Control: equally many steps on {length} words": (
            f"train --model {start} --output {control} --intervention none {common}"
        ),
        "Asking all three for keys": (
            f"retrieve {start} {far} {control} --lengths {lengths} --samples {budget.samples} --output {keys} "
            "--no-cache"
        ),
    }


def memory_section(folder: Path) -> str:
    """The second act as HTML, from the results of `lengthgen retrieve` in `folder`."""
    from hf_recurrent_lengthgen.evaluation.files import read_result
    from hf_recurrent_lengthgen.metrics import RetrievalComparison
    from hf_recurrent_lengthgen.metrics.retrieval.figure import heat_map_figure, retrieval_accuracy_figure
    from hf_recurrent_lengthgen.plotting.html import picture

    models = read_result(folder / "retrieval.json", RetrievalComparison).models
    lengths = models[0].lengths
    shown = (0, len(lengths) // 2, -1)
    found = "; ".join(
        f"{result.model} {' / '.join(f'{result.by_length[place].accuracy:.0%}' for place in shown)}"
        for result in models
    )
    far, control = FAR_ROLES
    said = (
        f"A model without harm need not use what stands far back. The model {far} learned to, on long prompts, read "
        f"in pieces of {models[0].training_length} tokens, between which the state passes and no gradient does. "
        f"{control} took as many steps on prompts of one piece. Keys found, in prompts of "
        f"{' / '.join(f'{lengths[place]:,}' for place in shown)} tokens: {found}."
    )
    pictures = (retrieval_accuracy_figure(models), "Keys found"), (heat_map_figure(models[1:2]), "By depth")
    drawn = "".join(picture(figure, title, f"{title}.", said) for figure, title in pictures)
    note = f'<p class="note">{escape(models[0].command)}</p>'
    return f'<section><h2>Far memory</h2><p>{escape(said)}</p><div class="pair">{drawn}</div>{note}</section>'


def base_config(settings: DemoSettings, vocab_size: int) -> "StatefulDeltaNetConfig":
    """The config of the base model."""
    from hf_recurrent_lengthgen.models import StatefulDeltaNetConfig

    return StatefulDeltaNetConfig(
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        allow_neg_eigval=True,
        num_hidden_layers=settings.num_layers,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        training_length=settings.training_length,
        **SPECIAL,
    )


def _steps(steps: int, learning_rate: float) -> str:
    logged = f"--weight-decay 0 --logging-steps {max(1, steps // 5)} --save-strategy no"
    return f"--max-steps {steps} --learning-rate {learning_rate} --lr-scheduler-type cosine {logged}"
