"""What was trained, with what, and how much of it: the record of a finished training."""

import json
import os
import sys
import time
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_recurrent_lengthgen.adapters import adapter_in_words, holds_adapter
from hf_recurrent_lengthgen.lineage import lineage_of, record_step
from hf_recurrent_lengthgen.private_text import portable
from hf_recurrent_lengthgen.records import TrainingRun
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.resumed_optimizers import as_json, made_with

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer

logger = logging.get_logger(__name__)

_STEPS = "scheduled steps"
RATES = ("learning rate", "schedule")
"""The settings that the rates of a run follow from."""
_EPSILON = 1e-8  # of Adam, everywhere
_NO_EFFECT = ("assume_shuffled", "nonfinite_states", "max_state_rms")
"""Settings that refuse or allow, and change nothing of what is trained."""


def record_lineage(trainer: "InitialStateTrainer", output: TrainOutput, folder: str | os.PathLike[str]) -> None:
    """Write the lineage of a model that a trainer was given, trained and saved, from what both know.

    Nothing is written where a model does not say which checkpoint it was loaded from, and for learned states.
    """
    model: Any = trainer.model
    start = str(getattr(model, "adapter_folder", "") or getattr(model.config, "_name_or_path", "") or "")
    if not start or not (holds_adapter(folder) or (Path(folder) / "config.json").is_file()):
        return
    method = method_of(trainer, trainer.about.name)
    data = trainer.train_dataset
    rows = _length(data)
    described = trainer.data_description or type(data).__name__ + ("" if rows is None else f" of {rows:,} rows")
    try:
        lineage = lineage_of(start)
    except ValueError as error:
        logger.warning(f"{folder} gets no lineage: {error}")
        return
    run = training_run(trainer, output, method or "none", described, _row_length(data, model.config))
    description = f"{method or 'plain training'}, {run.steps:,} steps"
    in_script = sys.argv[0].endswith(".py") and "ipykernel" not in sys.argv[0]
    record_step(Path(folder), lineage, "train", description, sys.argv if in_script else [], run)


def method_of(trainer: "InitialStateTrainer", name: str) -> str:
    """What a trainer did: its method by name, and the loss; "" for plain training, also if no state was ever given."""
    methods = [name] if name != "none" else []
    if methods and trainer.gives_states and not trainer.run_record.given:
        logger.warning(
            f"No sequence of the {trainer.state.global_step} steps started from another state than zero: the lineage "
            f"tells of plain training, not of {name}."
        )
        methods = []
    if trainer.args.alignment_alpha:
        methods.append(f"output alignment {trainer.args.alignment_alpha:g}")
    return " with ".join(methods)


def _row_length(data: Any, config: Any) -> int:
    """Predicted tokens of a row: what the data set or the config says, else what the first row holds."""
    length = getattr(data, "length", None) or getattr(config, "training_length", None)
    return int(length) if length else len(next(iter(data))["input_ids"])


def training_run(
    trainer: Trainer,
    output: TrainOutput,
    method: str,
    data: str,
    length: int,
    further: dict[str, str] | None = None,
) -> TrainingRun:
    """The record of a training that is finished.

    Args:
        trainer: Any Trainer after `train`.
        output: What `train` returned.
        method: Name of the method, with what goes with it.
        data: Description for people.
        length: Tokens of a row, T.
        further: Settings that the trainer does not know.
    """
    args, steps = trainer.args, trainer.state.global_step
    record = getattr(trainer, "run_record", None) or RunRecord()
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    told = adapter_in_words(trainer.model)
    adapter = {} if told is None else {"adapter": told}
    all_rows = _rows_seen(trainer, rows)
    tokens = record.tokens(trainer)
    batch = (
        f"{rows:,} rows of {tokens / all_rows:,.0f} tokens on average"
        if tokens
        else f"{rows:,} rows of {length:,} tokens"
    )
    return TrainingRun(
        method,
        data,
        steps,
        tokens or length * all_rows,
        record.seconds_before + float(output.metrics["train_runtime"]),
        mean_loss(trainer.state.log_history, float(output.training_loss)),
        hardware(args),
        {"batch": batch} | adapter | record.settings(trainer) | _weights(trainer) | (further or {}),
    )


def _weights(trainer: Trainer) -> dict[str, str]:
    """Which weights were kept, if not the last ones."""
    state = trainer.state
    if not trainer.args.load_best_model_at_end or state.best_global_step in (None, state.global_step):
        return {}
    return {"weights": f"of step {state.best_global_step:,}, best in {trainer.args.metric_for_best_model}"}


class RunRecord:
    """What a run was trained with, over all the parts between its resumes; checkpoints keep it.

    Attributes:
        given: Sequences of this process that started from a state other than zero.
        groups: Settings that the groups of the optimizer started with in the part before; empty if not recorded.
        seconds_before: What the parts before took.
    """

    def __init__(self) -> None:
        self.given: float | Tensor = 0.0
        self.groups: list[dict[str, Any]] = []
        self.seconds_before = 0.0
        self._began = time.monotonic()
        self._tokens = 0
        self._before: list[dict[str, Any]] = []
        self._start = 0

    def begin(self, trainer: Trainer, saved: dict[str, Any] | None = None, step: int = 0) -> None:
        """A new run of a trainer, or one that goes on at a step of another, whose record is `saved`."""
        saved = saved or {}
        self._tokens = saved.get("tokens", 0) - _tokens_read(trainer)  # a trainer counts over all of its runs
        self.seconds_before, self._began = saved.get("seconds", 0.0), time.monotonic()
        self.groups = list(saved.get("groups", []))
        self.given, self._before, self._start = saved.get("given", 0.0), list(saved.get("parts", [])), step

    def found_unrecorded(self, trainer: Trainer, groups: list[dict[str, Any]]) -> None:
        """The settings that a trainer and the groups have now are those of an earlier run which kept no record."""
        if self._start and not self._before:
            known = settings(trainer, groups)
            del known[_STEPS]  # Trainer has not set them yet
            self._before = [{"from": 0, "settings": known}]

    def saved(self, trainer: Trainer) -> dict[str, Any]:
        """What `begin` takes."""
        has_steps = not self._before or trainer.state.global_step > self._start
        parts = [*self._before, *([{"from": self._start, "settings": settings(trainer)}] if has_steps else [])]
        groups = as_json([] if trainer.optimizer is None else made_with(trainer.optimizer))
        seconds = self.seconds_before + time.monotonic() - self._began
        done = {"given": float(self.given), "tokens": self.tokens(trainer), "seconds": seconds}
        return done | {"parts": parts, "groups": groups}

    def tokens(self, trainer: Trainer) -> int:
        """Real tokens of all steps, where the trainer counts them; else 0."""
        return self._tokens + _tokens_read(trainer)

    def changes(self, trainer: Trainer) -> dict[str, tuple[str | None, str]]:
        """The settings that differ from the part before, by name: what they were, and are."""
        if not self._before:
            return {}
        old, new = self._before[-1]["settings"], settings(trainer)
        pairs = {name: (old.get(name, _unknown(name, new)), new.get(name, "none")) for name in {**old, **new}}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def settings(self, trainer: Trainer) -> dict[str, str]:
        """The settings of all parts, by name: "0.001 to step 100, then 0.0005"."""
        parts = self.saved(trainer)["parts"]
        told = {}
        for name in {name: None for part in parts for name in part["settings"]}:
            last = parts[-1]["settings"]
            values = [(part["from"], part["settings"].get(name, _unknown(name, last))) for part in parts]
            changes = [pair for i, pair in enumerate(values) if i == 0 or pair[1] != values[i - 1][1]]
            texts = [f"{old} to step {start:,}" for (_, old), (start, _) in pairwise(changes)] + [changes[-1][1]]
            told[name] = ", then ".join(texts)
        if told[_STEPS] == f"{trainer.state.global_step:,}":
            del told[_STEPS]
        return told


def _tokens_read(trainer: Trainer) -> int:
    return int(getattr(trainer, "tokens_read", 0))


def _unknown(name: str, later: dict[str, str]) -> str | None:
    """What stands for a setting that an earlier part has not: nothing, or, of the steps, no change."""
    return later.get(name) if name == _STEPS else "none"


def rows_seen(steps: int, rows: int, accumulation: int, batches: int | None, dataset: int | None) -> int:
    """Rows of all steps together: the last step of an epoch may have fewer.

    Args:
        steps: Optimizer steps.
        rows: Rows of a whole step, over accumulation steps and processes.
        accumulation: Micro-batches of a whole step.
        batches: Micro-batches of an epoch; None for data without a length.
        dataset: Rows of the data, of which an epoch leaves out those that fill no batch; None if that is unknown.
    """
    if not batches or dataset is None:
        return steps * rows
    epochs, rest = divmod(steps, -(-batches // accumulation))
    return epochs * min(dataset, batches * rows // accumulation) + rest * rows


def _rows_seen(trainer: Trainer, rows: int) -> int:
    batches = _length(trainer.callback_handler.train_dataloader)
    accumulation = trainer.args.gradient_accumulation_steps
    return rows_seen(trainer.state.global_step, rows, accumulation, batches, _length(trainer.train_dataset))


def mean_loss(log: list[dict[str, float]], otherwise: float) -> float:
    """Mean of the logged training losses, each over the steps since the one before; `otherwise` without any."""
    total, last = 0.0, 0
    for entry in log:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - last)
            last = int(entry["step"])
    return total / last if last else otherwise


def hardware(args: TrainingArguments) -> str:
    """ "2 x NVIDIA H100 80GB HBM3", "CPU (2 threads)"."""
    if args.device.type == "cuda":
        return f"{args.world_size * max(1, args.n_gpu)} x {torch.cuda.get_device_name(args.device)}"
    if args.device.type != "cpu":
        return f"{args.world_size} x {args.device.type}"
    threads = f"{(count := torch.get_num_threads())} thread{'s' if count > 1 else ''}"
    return f"CPU ({threads})" if args.world_size == 1 else f"CPU ({args.world_size} processes, {threads} each)"


def settings(trainer: Trainer, groups: list[dict[str, Any]] | None = None) -> dict[str, str]:
    """The settings that a repetition needs, by name, as text.

    Args:
        trainer: Whose they are.
        groups: Settings of the groups of the optimizer; by default those that it started with, if it is made.
    """
    args = trainer.args
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if args.lr_scheduler_kwargs:
        schedule += f" {json.dumps(args.lr_scheduler_kwargs)}"
    warmup = f"{args.warmup_steps:g} steps" if args.warmup_steps >= 1 else f"{args.warmup_steps:.0%} of the steps"
    schedule = f"{schedule}, warm-up {warmup}" if args.warmup_steps else schedule
    if groups is None:
        groups = [] if trainer.optimizer is None else made_with(trainer.optimizer)
    rate = groups[0].get("initial_lr", args.learning_rate) if groups else args.learning_rate
    found = {
        "learning rate": f"{float(rate):g}",
        "schedule": getattr(trainer, "given_scheduler", None) or schedule,
        _STEPS: f"{trainer.state.max_steps:,}",
        "optimizer": _optimizer(args, trainer.optimizer, groups),
        "gradient norm": f"at most {args.max_grad_norm:g}" if args.max_grad_norm else "any",
        "precision": "bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else "float32",
        "seed": str(args.seed),
    }
    if args.neftune_noise_alpha:
        found["noise on embeddings"] = f"NEFTune {args.neftune_noise_alpha:g}"
    return found | (_of_method(args) if isinstance(args, InitialStateConfig) else {}) | _of_other(args)


def _optimizer(args: TrainingArguments, optimizer: Any, groups: list[dict[str, Any]]) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    told: dict[str, Any] = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    if optimizer is not None:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        name = name if kind.lower() in name.replace("_", "") else kind  # one of the user's own
        told = groups[0] | {"weight_decay": max(group.get("weight_decay", 0) for group in groups)}
    if "betas" in told:
        name += ", betas " + " and ".join(f"{float(beta):g}" for beta in told["betas"])
    if told.get("momentum"):
        name += f", momentum {float(told['momentum']):g}"
    if "betas" in told and told.get("eps", _EPSILON) != _EPSILON:
        name += f", epsilon {float(told['eps']):g}"
    return f"{name}, weight decay {float(told['weight_decay']):g}"


def _of_method(args: InitialStateConfig) -> dict[str, str]:
    """Settings of the method that are on."""
    left_out = {*_NO_EFFECT, *(() if args.alignment_alpha else ("alignment_alpha", "alignment_min_extra"))}
    given = {name: value for name, value in args.method_settings().items() if name not in left_out}
    return {
        name.replace("_", " "): portable(value) if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
        if value is not None
    }


def _of_other(args: TrainingArguments) -> dict[str, str]:
    """Settings of the trainer that a method was put on, SFTTrainer for one, which are not its defaults."""
    known = {item.name for item in fields(TrainingArguments)}
    if isinstance(args, InitialStateConfig):
        known |= set(args.method_settings())
    found = {}
    for item in fields(args):
        value, default = getattr(args, item.name), item.default
        if item.name in known or value is None or (default is not MISSING and value == default):
            continue
        found[item.name.replace("_", " ")] = (
            portable(value) if isinstance(value, str) else json.dumps(value, default=str)
        )
    return found


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
