"""`lengthgen demo`: a small model fails beyond its training length, state passing cures it, plain training does not.

The base model is DeltaNet on bytes, with rates of up to 2 (Grazzi et al., 2025, arXiv:2411.12537) and fla's own start:
the delta rule has no decay, so its states leave those of training as soon as texts get longer. Everything is trained
from scratch on text that every machine has, the source files of the Python standard library.
"""

import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli import evaluate, train
from hf_recurrent_lengthgen.cli.inputs import quiet_libraries
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.report import summary_table, write_report
from hf_recurrent_lengthgen.cli.shared_options import add_shared
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.models import StatefulDeltaNetConfig


@dataclass(frozen=True)
class Budget:
    """Lengths in tokens (bytes), steps and texts; `evaluation_multiple` is in training lengths."""

    training_length: int = 128
    batch_size: int = 16
    base_steps: int = 1000
    base_learning_rate: float = 4e-3
    cure_steps: int = 1000
    cure_learning_rate: float = 2.5e-3
    state_drop_probability: float = 0.1
    evaluation_multiple: int = 64
    sequences: int = 32


@dataclass(frozen=True)
class DemoSettings(Budget):
    """Sizes and budgets of the demo."""

    hidden_size: int = 96
    num_heads: int = 3
    num_layers: int = 2


DEFAULTS = DemoSettings()
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
START = "start.json"
ROLES = ("base", "cured", "control")
DESCRIPTION = """\
Train a small DeltaNet on the sources of the Python standard library, see it fail beyond its training length, cure it
with state passing, and compare with equally many plain steps. Takes 5 to 7 minutes on two cores and downloads
nothing. The output folder holds:

  index.html   page with figures and numbers: open it in a browser
  result.json  the numbers; position_wise, context_harm and in_window also as .png and .svg
  start.json   the config of the model, from which the commands that are printed train it
  base/        the model that fails; with cured/ and control/ a checkpoint that loads with trust_remote_code=True
"""
EXAMPLES = """\
lengthgen demo
lengthgen demo --output second-demo --seed 1
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen demo", DESCRIPTION, EXAMPLES)
    add_shared(parser, "--output", "--seed", output="demo-output")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    run_demo(Path(options.output), options.seed)
    return 0


def run_demo(output: Path, seed: int = 0, settings: DemoSettings = DEFAULTS) -> Comparison:
    """Train base, cured and control, evaluate them on the same held-out text, and write the report.

    Writes `base/`, `cured/`, `control/` (checkpoints with code), `result.json`, figures and `index.html`.

    Raises:
        ValueError: if one of the three folders holds files that no demo wrote; nothing is overwritten.
    """
    began = time.perf_counter()
    for folder in (output / role for role in ROLES):
        if folder.is_dir() and any(folder.iterdir()) and not (output / START).is_file():
            raise ValueError(f"{folder} holds files that no demo wrote: give another --output.")
        shutil.rmtree(folder, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    base_config(settings, len(byte_tokenizer())).to_json_file(output / START)
    stages = {
        f"Training a model from scratch on {settings.training_length}-byte pieces of text": [
            *("--model", output / START, "--output", output / "base", "--intervention", "none"),
            *_steps(settings.base_steps, settings.base_learning_rate),
        ],
        "Curing it: a few more steps with state passing": [
            *("--model", output / "base", "--output", output / "cured", "--intervention", "state_passing"),
            *("--state-drop-probability", settings.state_drop_probability),
            *_steps(settings.cure_steps, settings.cure_learning_rate),
        ],
        "Control: equally many plain steps": [
            *("--model", output / "base", "--output", output / "control", "--intervention", "none"),
            *_steps(settings.cure_steps, settings.cure_learning_rate),
        ],
    }
    common = ("--training-length", settings.training_length, "--per-device-train-batch-size", settings.batch_size)
    with quiet_libraries("warnings", "bars"):
        for number, (what, arguments) in enumerate(stages.items(), 1):
            command = _announced(f"[{number}/4] {what}", "train", *arguments, *common, "--seed", seed)
            train.run(command)
        length = settings.evaluation_multiple * settings.training_length
        command = _announced(
            f"[4/4] Evaluating all three on {settings.sequences} held-out texts of {length:,} bytes",
            "evaluate",
            *(*(output / role for role in ROLES), "--roles", ",".join(ROLES), "--length", length),
            *("--sequences", settings.sequences, "--output", output, "--no-cache"),
        )
        comparison, _ = evaluate.compare(evaluate.command_parser().parse_args(command), command)
    page = write_report(comparison, output, checkpoint=output / "cured")
    print(f"\n{summary_table(comparison)}\n\nTotal: {time.perf_counter() - began:.0f} s. Page with figures: {page}")
    return comparison


def base_config(settings: DemoSettings, vocab_size: int) -> StatefulDeltaNetConfig:
    """The config of the base model."""
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


def _steps(steps: int, learning_rate: float) -> list[object]:
    return [
        *("--max-steps", steps, "--learning-rate", learning_rate, "--lr-scheduler-type", "cosine"),
        *("--weight-decay", 0, "--logging-steps", max(1, steps // 5), "--save-strategy", "no"),
    ]


def _announced(what: str, command: str, *arguments: object) -> list[str]:
    """The arguments of a command, which is printed first."""
    words = [str(argument) for argument in arguments]
    print(f"\n{what}\n  {shlex.join(['lengthgen', command, *words])}", flush=True)
    return words
