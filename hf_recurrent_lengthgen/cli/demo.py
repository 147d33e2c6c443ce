"""`lengthgen demo`: a small model fails beyond its training length, state passing cures it, plain training does not.

The base model is Mamba-2 on bytes with mimetic initialization (Trockman et al., 2024, arXiv:2410.11135): its heads
forget almost nothing, so it leaves the states of its training as soon as texts get longer. Everything is trained from
scratch on text that every machine has, the source files of the Python standard library.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.checkpoints.records import InitialWeights, Lineage, last_training, record_step
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.cli.inputs import Stream, load_stream, quiet_libraries
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.report import summary_table, write_report
from hf_recurrent_lengthgen.cli.shared_options import add_shared
from hf_recurrent_lengthgen.cli.threads import FitThreads
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.results import DataRecord, Role, TrainingRecord
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.run.records import RunFacts, training_run


@dataclass(frozen=True)
class DemoSettings:
    """Sizes and budgets of the demo; lengths in tokens (bytes), `evaluation_multiple` in training lengths."""

    hidden_size: int = 96
    head_dim: int = 32
    state_size: int = 32
    num_layers: int = 2
    mimetic_c: float = 5.0
    mimetic_offset: int = 1
    training_length: int = 128
    batch_size: int = 16
    base_steps: int = 1000
    base_learning_rate: float = 4e-3
    cure_steps: int = 1000
    cure_learning_rate: float = 2.5e-3
    state_drop_probability: float = 0.1
    evaluation_multiple: int = 64
    sequences: int = 32


DEFAULTS = DemoSettings()
MARK = ".demo"  # marks the folders of a demo, which may be overwritten
STAGES: tuple[tuple[Role, str], ...] = (
    ("base", "Training a model from scratch on {length}-byte pieces of text"),
    ("cured", "Curing it: a few more steps with state passing"),
    ("control", "Control: equally many plain steps"),
)
LABELS: dict[Role, str] = {"base": "base", "cured": "state passing", "control": "control"}
DESCRIPTION = """\
Train a small Mamba-2 on the sources of the Python standard library, see it fail beyond its training length, cure it
with state passing, and compare with equally many plain steps. Takes about five minutes on two cores and downloads
nothing. The output folder holds:

  index.html   page with figures and numbers: open it in a browser
  result.json  the numbers; position_wise, context_harm and in_window also as .png and .svg
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


def _command(output: Path, seed: int) -> list[str]:
    return ["lengthgen", "demo", "--output", str(output), "--seed", str(seed)]


def run_demo(output: Path, seed: int = 0, settings: DemoSettings = DEFAULTS) -> Comparison:
    """Train base, cured and control, evaluate them on the same held-out text, and write the report.

    Writes `base/`, `cured/`, `control/` (checkpoints with code), `result.json`, figures and `index.html`.

    Raises:
        ValueError: if one of the three folders holds files that no demo wrote; nothing is overwritten.
    """
    began, threads = time.perf_counter(), FitThreads()
    for role, _ in STAGES:
        folder = output / role
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
            raise ValueError(f"{folder} holds files that no demo wrote: give another --output.")
    tokenizer = byte_tokenizer()
    train = load_stream("stdlib", "train", tokenizer)
    held_out = load_stream("stdlib", "validation", tokenizer)
    length = settings.evaluation_multiple * settings.training_length
    tokens = evaluation_sequences(held_out.tokens, settings.sequences, length + 1)
    records = {}
    with quiet_libraries("warnings", "bars"):
        for number, (role, what) in enumerate(STAGES, 1):
            print(f"\n[{number}/4] {what.format(length=settings.training_length)}", flush=True)
            _clear(output / role)
            done = records[role] = _train(role, output, seed, settings, train, threads)
            words = f"{done.steps} steps in {done.seconds:.0f} s, mean loss {done.loss:.3f}, in {output / role}"
            print(f"  done: {words}")
        print(f"\n[4/4] Evaluating all three on {settings.sequences} held-out texts of {length:,} bytes", flush=True)
        data = DataRecord(held_out.source, token_unit="byte")
        command = shlex.join(_command(output, seed))
        measured = EvaluationSettings(seed=seed, command=command, progress=sys.stderr.isatty())
        compared = []
        for role, _ in STAGES:
            result = evaluate_model(
                load_model(str(output / role)), tokens, settings.training_length, LABELS[role], data, measured
            )
            print(f"  {role}: done in {result.wall_seconds:.0f} s", flush=True)
            compared.append(ComparedModel(role, result, records[role]))
    comparison = Comparison(f"Beyond {settings.training_length} bytes: failure and cure", tuple(compared))
    page = write_report(comparison, output, checkpoint=output / "cured")
    print(f"\n{summary_table(comparison)}\n\nTotal: {time.perf_counter() - began:.0f} s. Page with figures: {page}")
    print("The cured checkpoint carries its own code:\n")
    print(f"    from transformers import AutoModelForCausalLM\n\n    {_load_line(output / 'cured')}")
    return comparison


def _load_line(folder: Path) -> str:
    return f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)"


def base_model(settings: DemoSettings, vocab_size: int, seed: int) -> StatefulMamba2ForCausalLM:
    """The base model before its training, with mimetic initialization."""
    set_seed(seed)
    config = StatefulMamba2Config(
        hidden_size=settings.hidden_size,
        head_dim=settings.head_dim,
        num_heads=2 * settings.hidden_size // settings.head_dim,
        state_size=settings.state_size,
        num_hidden_layers=settings.num_layers,
        n_groups=1,
        vocab_size=vocab_size,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=True,
        training_length=settings.training_length,
    )
    model = StatefulMamba2ForCausalLM(config)
    mimetic_initialization(model, c=settings.mimetic_c, offset=settings.mimetic_offset)
    return model


def _clear(folder: Path) -> None:
    """Remove the model of an earlier demo."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text("{}\n")
    for old in folder.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name != MARK:
            old.unlink()


class _Progress(TrainerCallback):
    """One bar on a terminal, and a line per logged loss."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(total=state.max_steps, desc="  training", unit="step", leave=False, disable=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.bar.clear()
            print(f"  step {state.global_step:>4} of {state.max_steps}: loss {float(logs['loss']):.3f}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()


def _arguments(role: Role, folder: Path, seed: int, settings: DemoSettings) -> TrainingArguments:
    base = role == "base"
    steps = settings.base_steps if base else settings.cure_steps
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": settings.base_learning_rate if base else settings.cure_learning_rate,
        "per_device_train_batch_size": settings.batch_size,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "seed": seed,
        "logging_steps": max(1, steps // 5),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if role == "cured":
        return StatePassingConfig(**common, state_drop_probability=settings.state_drop_probability)
    return TrainingArguments(**common)


def _train(
    role: Role, output: Path, seed: int, settings: DemoSettings, train: Stream, threads: FitThreads
) -> TrainingRecord:
    """Train one of the three models into `output/role`."""
    folder, tokenizer = output / role, byte_tokenizer()
    arguments = _arguments(role, folder, seed, settings)
    model: Any
    if role == "base":
        model, start = base_model(settings, len(tokenizer), seed), Lineage()
        weights = InitialWeights({"c": settings.mimetic_c, "offset": settings.mimetic_offset})
    else:
        model, start, weights = load_model(str(output / "base")), lineage_of(str(output / "base")), None
    blocks = PackedBlocks(train.tokens, settings.training_length)
    trainer_class: Any = StatePassingTrainer if role == "cured" else Trainer
    trainer = trainer_class(model, arguments, train_dataset=blocks, processing_class=tokenizer)
    if role == "cured":
        model.config.interventions = [f"state_passing, {settings.cure_steps} steps"]
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Progress)
    trainer.add_callback(threads)
    done = trainer.train()
    trainer.save_model()
    facts = RunFacts(start, train.source, settings.training_length, tuple(_command(output, seed)), weights)
    lineage = record_step(folder, facts.start, "train", "", facts.command, training_run(trainer, done, facts))
    record = last_training(lineage)
    assert record is not None
    return record
