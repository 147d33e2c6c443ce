"""The lineage and the verification of a checkpoint folder, and its JSON files."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.private_text import portable_command
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import Scalar, Value, document
from hf_recurrent_lengthgen.evaluation.results import DataSource, TrainingRecord
from hf_recurrent_lengthgen.versions import installed_versions

LINEAGE_FILE, VERIFICATION_FILE = "lineage.json", "verification.json"
AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Source:
    """The checkpoint that a lineage begins with.

    Args:
        name: Its name on the Hub (owner/name), or that of a folder or file, without its path.
        on_hub: Whether `name` is a name on the Hub.
        revision: Commit on the Hub, 40 hex digits; None if unknown.
        format: Its layout: "mamba-ssm", "transformers", "fla", "rwkv", "rwkv-hf", "rwkv7-hf", "lengthgen"
            (ours).
        license: The license in its card; None if there is none.
        files: SHA-256 of its weight files, by name.
    """

    name: str
    on_hub: bool
    revision: str | None
    format: str
    license: str | None
    files: dict[str, str]


@dataclass(frozen=True)
class Settings:
    """The training settings from a step on, by the names of `TrainingArguments`; None: does not apply.

    Args:
        from_step: The step; above 0 if a run was resumed with other settings.
        max_steps: Steps of the schedule; None if unknown.
        learning_rate: Peak learning rate of the first parameter group.
        lr_scheduler_type, optim: Name in Transformers, or the name of a custom class.
        warmup_steps: Steps if at least 1, else a fraction of all steps.
        weight_decay: Largest weight decay of any group.
        precision: Precision of the matrix products.
        method: Active options of the method, by name: state_drop_probability, alignment_alpha, ...
        others: Options of another trainer that the method was combined with, if not default.
    """

    from_step: int
    max_steps: int | None
    learning_rate: float
    lr_scheduler_type: str
    optim: str
    weight_decay: float
    max_grad_norm: float | None
    precision: Literal["float32", "bfloat16", "float16"]
    seed: int
    lr_scheduler_kwargs: dict[str, Scalar] = field(default_factory=dict)
    warmup_steps: float = 0.0
    betas: tuple[float, ...] | None = None
    epsilon: float | None = None
    momentum: float | None = None
    neftune_noise_alpha: float | None = None
    method: dict[str, Value] = field(default_factory=dict)
    others: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    """An adapter of PEFT: its kind ("LORA"), rank, scale, and the ends of the names of its layers."""

    kind: str
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class InitialWeights:
    """The initial weights of a training from scratch: random, or mimetic with its options.

    `changed` says in words what else was changed in the random weights.
    """

    mimetic: dict[str, Value] | None = None
    changed: str | None = None


@dataclass(frozen=True)
class Hardware:
    """The hardware of a training: "cpu" or the name of a GPU, number of processes or GPUs, CPU threads per process."""

    device: str
    number: int
    threads: int | None = None


@dataclass(frozen=True)
class TrainingRun:
    """One training of a checkpoint.

    Args:
        methods: The main one first; `methods.PLAIN` alone for plain training.
        training_length: Tokens of a sequence, T; of the longest if lengths differ.
        rows_per_step: Sequences of an optimizer step, over accumulation and processes.
        steps: Optimizer steps.
        tokens: Tokens of all steps: sequences times training length, or real tokens if the trainer counts them. If a
            task scores its answers only, fewer tokens are predicted.
        row_tokens: Mean number of real tokens of a sequence, if the trainer counts them.
        seconds: Wall-clock time of training, over all resumes.
        loss: Mean of the training losses that Trainer logged, in nats per token; None if the run was resumed after its
            last step and logged none.
        settings: The settings from step 0, and further ones if the run was resumed with other settings.
        initial_weights: Initial weights of a training from scratch.
        best_step: Step whose weights were saved, if not the last.
        best_metric: The metric that chose it.
    """

    methods: tuple[Method, ...]
    data: DataSource
    training_length: int
    rows_per_step: int
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    hardware: Hardware
    settings: tuple[Settings, ...]
    row_tokens: float | None = None
    adapter: Adapter | None = None
    initial_weights: InitialWeights | None = None
    best_step: int | None = None
    best_metric: str | None = None


@dataclass(frozen=True)
class Step:
    """One step of a lineage.

    Args:
        description: Text for people; "" for trainings.
        command: Shell command of the step; "" if it was run from Python.
        versions: Versions of Python and packages.
        tokenizer: For conversions, the tokenizer that replaces that of the source.
    """

    kind: Literal["convert", "train", "expand", "forget", "merge"]
    description: str
    command: str
    versions: dict[str, str]
    training: TrainingRun | None = None
    tokenizer: str | None = None


@document("lineage", version=2)
@dataclass(frozen=True)
class Lineage:
    """Where the weights of a checkpoint come from; `source` is None for random initial weights."""

    source: Source | None = None
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> "Lineage":
        return replace(self, steps=(*self.steps, step))


@dataclass(frozen=True)
class Check:
    """One comparison of a verification.

    Args:
        what: "logits", "final state", "logits in chunks", ...
        against: The reference: "mamba_ssm 2.3.2 MambaLMHeadModel", "this package, weights of the source", ...
        tokens: Number of tokens that were read.
        difference: Largest absolute difference, divided by the largest value if that is above 1; or a count of errors.
        tolerance: The largest allowed difference.
    """

    what: str
    against: str
    tokens: int
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


@document("verification")
@dataclass(frozen=True)
class Verification:
    """The checks of a checkpoint, and the SHA-256 of its weights, config and code, by name."""

    files: dict[str, str]
    checks: tuple[Check, ...]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


def read_lineage(folder: str | os.PathLike[str]) -> Lineage | None:
    """The lineage of a checkpoint folder; None if it has none. A damaged file is a `ValueError`."""
    path = Path(folder) / LINEAGE_FILE
    return read_result(path, Lineage) if path.is_file() else None


def trainings(folder: str | os.PathLike[str]) -> list[TrainingRun]:
    """The trainings of a checkpoint folder, the last one last, as far as it has a lineage."""
    lineage = read_lineage(folder)
    return [step.training for step in lineage.steps if step.training] if lineage else []


def write_lineage(folder: str | os.PathLike[str], lineage: Lineage) -> None:
    write_result(Path(folder) / LINEAGE_FILE, lineage)


def read_verification(folder: str | os.PathLike[str]) -> Verification | None:
    """The verification of a checkpoint folder; None if it has none. A damaged file is a `ValueError`."""
    path = Path(folder) / VERIFICATION_FILE
    return read_result(path, Verification) if path.is_file() else None


def write_verification(folder: str | os.PathLike[str], verification: Verification) -> None:
    write_result(Path(folder) / VERIFICATION_FILE, verification)


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("*.model", "*.tiktoken", "rwkv_vocab*.txt", "chat_template.*", "additional_chat_templates/*.jinja"),
)
"""Patterns of the files of a tokenizer, without its code."""
CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "*.py"),
    *TOKENIZER_FILES,
)
"""Patterns of the files that determine the outputs of a checkpoint: model, tokenizer, generation."""
TRAINER_STATES = "initial_states_*"
"""Files of our trainers for resuming, which do not affect outputs."""


def verified_files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of the files that determine the outputs of a checkpoint (`CHECKPOINT_FILES`), by name."""
    paths = {path for pattern in CHECKPOINT_FILES for path in Path(folder).glob(pattern) if path.is_file()}
    chosen = sorted(path for path in paths if not path.match(TRAINER_STATES))
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in chosen}


def unverified(folder: str | os.PathLike[str], now: dict[str, str] | None = None) -> str | None:
    """Why the files of a folder (digests `now`, if known already) are not verified; None if they are."""
    try:
        verification = read_verification(folder)
    except ValueError as error:
        return f"its verification is damaged ({error})"
    if verification is None:
        return "it has not been verified"
    if not verification.passed:
        failed = [f"{check.what} against {check.against}" for check in verification.checks if not check.passed]
        return f"its verification did not pass ({'; '.join(failed) or 'it holds no checks'})"
    now = verified_files(folder) if now is None else now
    differing = {name for name, _ in now.items() ^ verification.files.items()}
    code = {name for name in verification.files if name.endswith(".py")}
    if differing and differing == code:
        return "it lacks the code that was verified"
    return f"it has changed since it was verified ({', '.join(sorted(differing))})" if differing else None


def carded(files: dict[str, str]) -> dict[str, str]:
    """The weights and config among `verified_files`, which the numbers of a card belong to."""
    parts = (".safetensors", ".safetensors.index.json")
    return {name: digest for name, digest in files.items() if name == "config.json" or name.endswith(parts)}


def last_training(lineage: Lineage | None) -> TrainingRecord | None:
    """The last step of a lineage if it is a training (merging afterwards is allowed), for tables; else None."""
    steps = [] if lineage is None else [step for step in lineage.steps if step.kind != "merge"]
    run = steps[-1].training if steps else None
    if run is None:
        return None
    last = run.settings[-1]
    drop = last.method.get("state_drop_probability")
    return TrainingRecord(
        tuple(method.title for method in run.methods),
        run.steps,
        run.seconds,
        run.loss,
        last.learning_rate,
        float(drop) if isinstance(drop, int | float) else None,
    )


def record_step(
    folder: Path,
    start: Lineage,
    kind: Literal["train", "expand", "forget", "merge"],
    description: str,
    command: Sequence[str],
    training: TrainingRun | None = None,
) -> Lineage:
    """Write the lineage of a checkpoint that a command made, and return it; arguments as in `Step`.

    Absolute paths in the command are shortened, so that they reveal nothing about the machine.
    """
    lineage = start.then(Step(kind, description, portable_command(command), installed_versions(), training))
    write_lineage(folder, lineage)
    return lineage


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a `ValueError` for damaged files."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {AGAIN}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}: {AGAIN}.")
    return value


def write_settings_file(path: Path, settings: dict[str, Any]) -> None:
    """Write a config.json, in the format of Transformers if it has a model type, else as plain JSON."""
    value = _tagged(settings) if "model_type" in settings else settings
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
    if isinstance(value, dict):
        return {name: _tagged(part) for name, part in value.items()}
    return [_tagged(part) for part in value] if isinstance(value, list | tuple) else value
