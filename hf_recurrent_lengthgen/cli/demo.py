"""`lengthgen demo`: a small model fails beyond its training length, and generalizes after state passing.

Part 2, passkey retrieval, post-trains a model that retrieves passkeys inside its training length on longer prompts,
read in chunks, after which it retrieves them far beyond.

The base model is DeltaNet on bytes, with rates of up to 2 (Grazzi et al., 2025, arXiv:2411.12537) and fla's default
initialization: the delta rule has no decay, so its states leave the training distribution as soon as texts get longer.
Everything is trained from scratch on text that every machine has, the source files of the Python standard library.
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
    post_training_steps: int = 300
    post_training_learning_rate: float = 2.5e-3
    state_drop_probability: float = 0.03
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
    """Prompts of 1 to `chunks` training lengths in training, `multiples` of it in tests with `samples` a depth."""

    sequences: int = 8
    chunks: int = 16
    steps: int = 200
    learning_rate: float = 1e-3
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    samples: int = 2


DEFAULTS = DemoSettings()
MEMORY = MemoryBudget()
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
START = "start.json"
FOLDERS = ("base", "state-passing", "control")
FAR_FOLDERS, PASSKEYS = ("far", "far-control"), "passkeys"
MEMORY_BASE = Path("model_cards/passkey-base")
DESCRIPTION = """\
Train a small DeltaNet on the sources of the Python standard library, see it fail beyond its training length, go on
with state passing, and compare with as many plain steps. Then, in a clone of the repository, post-train a model that
retrieves passkeys in 128 words on longer prompts. Takes a few minutes on two cores and downloads nothing. The output
folder holds:

  index.html      page with figures and numbers: open it in a browser
  result.json     the numbers; tables.md, and position_wise, context_harm and in_window as .png and .svg
  start.json      the config of the model, from which the commands that are printed train it
  base/           the model that fails; checkpoints load with trust_remote_code=True
  state-passing/  after state passing
  control/        after as many plain steps
  far/            the model that retrieves passkeys far back; far-control/: after as many plain steps on short prompts
  passkeys/       the accuracy of both and of their base
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
        help="checkpoint that retrieves passkeys inside its training length, for part 2, or none to skip part 2 "
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
    """Train a base, post-train it with state passing and plainly, evaluate all on held-out text, write the report.

    With `memory_base`, a checkpoint folder, two more are trained from it and tested on passkeys (`passkey_stages`).

    Writes `base/`, `state-passing/`, `control/` (checkpoints with code), `result.json`, figures and `index.html`; in
    part 2 also `far/`, `far-control/` and `passkeys/`.

    Raises:
        ValueError: if a folder of a checkpoint holds files that no demo wrote, which are not overwritten.
    """
    from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
    from hf_recurrent_lengthgen.cli import train
    from hf_recurrent_lengthgen.cli.report import summary, write_report
    from hf_recurrent_lengthgen.data import byte_tokenizer

    began = time.perf_counter()
    stages = failure_stages(output, settings)
    if memory_base is not None:
        stages |= passkey_stages(memory_base, output, memory)
    for folder in (output / name for name in (*FOLDERS, *FAR_FOLDERS)):
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
                page = write_report(comparison, output, checkpoint=output / FOLDERS[1])  # stays if part 2 fails
                print(f"\n{summary(comparison)}")
            else:
                {"train": train.run, "retrieve": retrieve.run}[command](words)
    if memory_base is None:
        print(f"\nNo part 2, passkey retrieval: it requires --memory-base, such as the repository's {MEMORY_BASE}.")
    else:
        page = write_report(comparison, output, output / FOLDERS[1], passkey_section(output / PASSKEYS))
    print(f"\nTotal: {time.perf_counter() - began:.0f} s. Page with figures: {page}")
    return comparison


def failure_stages(output: Path, settings: DemoSettings) -> dict[str, str]:
    """The commands of part 1, by what they do: base, state passing, control, and the evaluation of all three."""
    start, base, passed, control = (shlex.quote(str(output / name)) for name in (START, *FOLDERS))
    length, texts = settings.evaluation_multiple * settings.training_length, settings.sequences
    batch = f"--training-length {settings.training_length} --per-device-train-batch-size {settings.batch_size}"
    train = f"{_steps(settings.base_steps, settings.base_learning_rate)} {batch}"
    further = f"{_steps(settings.post_training_steps, settings.post_training_learning_rate)} {batch}"
    passing = f"--intervention state_passing --state-drop-probability {settings.state_drop_probability}"
    return {
        f"Training a model from scratch on chunks of {settings.training_length} bytes": (
            f"train --model {start} --output {base} --intervention none {train}"
        ),
        "State passing: a few more steps": f"train --model {base} --output {passed} {passing} {further}",
        "Control: as many plain steps": f"train --model {base} --output {control} --intervention none {further}",
        f"Evaluating all three on {texts} held-out texts of {length:,} bytes": (
            f"evaluate {base} {passed} {control} --roles base,intervention,control --length {length} "
            f"--sequences {texts} --output {shlex.quote(str(output))} --no-cache"
        ),
    }


def passkey_stages(base: Path, output: Path, budget: MemoryBudget) -> dict[str, str]:
    """The commands of part 2, by what they do: passkeys in long prompts, a control in short ones, the test of both.

    Raises:
        ValueError: if `base` is a checkpoint that this demo would overwrite.
    """
    from hf_recurrent_lengthgen.checkpoints.records import read_json_object

    if base.resolve() in [(output / name).resolve() for name in (*FOLDERS, *FAR_FOLDERS)]:
        raise ValueError(f"This demo would overwrite --memory-base {base}: give another --output.")
    length = read_json_object(base / "config.json")["training_length"]
    start = shlex.quote(str(base))
    far, control, passkeys = (shlex.quote(str(output / name)) for name in (*FAR_FOLDERS, PASSKEYS))
    longest, lengths = budget.chunks * length, ",".join(str(length * multiple) for multiple in budget.multiples)
    batch = f"--task passkey --training-length {length} --per-device-train-batch-size {budget.sequences}"
    common = f"{batch} {_steps(budget.steps, budget.learning_rate)}"
    return {
        f"Passkeys: from prompts of {length} words to prompts of up to {longest:,}, read in chunks": (
            f"train --model {start} --output {far} --intervention tbtt --task-length {length}-{longest} {common}"
        ),
        f"Control: as many steps on {length} words": (
            f"train --model {start} --output {control} --intervention none {common}"
        ),
        "Passkey accuracy of all three": (
            f"retrieve {start} {far} {control} --lengths {lengths} --samples {budget.samples} --output {passkeys} "
            "--no-cache"
        ),
    }


def passkey_section(folder: Path) -> str:
    """Part 2 as HTML, from the results of `lengthgen retrieve` in `folder`."""
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
    far, control = FAR_FOLDERS
    said = (
        f"A model that generalizes need not use distant context. The model {far} learned to, on long prompts, read "
        f"in chunks of {models[0].training_length} tokens: the state passes from chunk to chunk, gradients do not. "
        f"{control} took as many steps on prompts of one chunk. Passkey accuracy, in prompts of "
        f"{' / '.join(f'{lengths[place]:,}' for place in shown)} tokens: {found}."
    )
    pictures = (retrieval_accuracy_figure(models), "Passkey accuracy"), (heat_map_figure(models[1:2]), "By depth")
    drawn = "".join(picture(figure, title, f"{title}.", said) for figure, title in pictures)
    note = f'<p class="note">{escape(models[0].command)}</p>'
    return f'<section><h2>Passkey retrieval</h2><p>{escape(said)}</p><div class="pair">{drawn}</div>{note}</section>'


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
