"""`Trainer` keeps no record of what it trained from and how; here model, data, settings and cost are recorded."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput, has_length
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.adapters import (
    adapter_folder,
    adapter_of,
    holds_adapter,
    holds_learned_state,
    write_adapter_base,
)
from hf_recurrent_lengthgen.checkpoints.methods import (
    ATTENTION_WINDOWS,
    MIMETIC_INITIALIZATION,
    OUTPUT_ALIGNMENT,
    PLAIN,
    Method,
)
from hf_recurrent_lengthgen.checkpoints.private_text import portable
from hf_recurrent_lengthgen.checkpoints.records import Hardware, InitialWeights, Lineage, Settings, TrainingRun
from hf_recurrent_lengthgen.evaluation.json_schema import Scalar, Value, from_plain, to_plain
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import MICRO_BATCH
from hf_recurrent_lengthgen.trainers.run.resume import own_file, saved_run, step_of

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer

logger = logging.get_logger(__name__)

_MAY_CHANGE = ("max_steps", "max_grad_norm", "precision", "neftune_noise_alpha")
"""What a resume may change; what else the optimizer has, it loads, and a schedule may have moved it."""
_NO_EFFECT = ("assume_shuffled",)
"""Settings that only control what is refused, so they do not change the result."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a training for its lineage that the trainer cannot know.

    Args:
        start: Lineage of the model that training starts from.
        data: The training data.
        training_length: Tokens per sequence, T.
        command: Program and arguments; empty for a training from Python.
        initial_weights: Initial weights of a training from scratch.
    """

    start: Lineage
    data: DataSource
    training_length: int
    command: tuple[str, ...] = ()
    initial_weights: InitialWeights | None = None


def record_model(trainer: "InitialStateTrainer", folder: Path, output: TrainOutput | None) -> None:
    """Record a model that a trainer saved: the base of an adapter, and after a training (`output`) the lineage.

    No lineage is written if neither `trainer.facts` nor the model names the checkpoint that the model was loaded from.
    """
    adapter = adapter_folder(folder, trainer.model)
    if hasattr(trainer.model, "peft_config") and holds_adapter(adapter):
        write_adapter_base(adapter, trainer.model)
        adapted: Any = trainer.model
        if not any(each.base_model_name_or_path for each in adapted.peft_config.values()):
            logger.warning(
                f"The adapter in {adapter} names no base, because its model was made in memory: load_model cannot "
                "load it. Before training, save the model to BASE and put the adapter on load_model(BASE). After it, "
                "save model.unload() to BASE, and set base_model_name_or_path in adapter_config.json to BASE."
            )
    for each in {folder, adapter} if output is not None else ():
        _record_lineage(trainer, output, each)  # type: ignore[arg-type]


def _record_lineage(trainer: "InitialStateTrainer", output: TrainOutput, folder: Path) -> None:
    if not (holds_adapter(folder) or holds_learned_state(folder) or (folder / "config.json").is_file()):
        return
    from hf_recurrent_lengthgen.checkpoints.records import record_step
    from hf_recurrent_lengthgen.checkpoints.sources import lineage_of

    try:
        facts = trainer.facts or _facts_of(trainer, lineage_of)
    except ValueError as error:
        logger.warning(f"{folder} gets no lineage: {error}")
        return
    if facts is not None:
        run = training_run(trainer, output, facts)
        record_step(folder, facts.start, "train", "", facts.command, run)


def _facts_of(trainer: "InitialStateTrainer", lineage_of: Callable[[str], Lineage]) -> RunFacts | None:
    """Facts known to trainer and model; None for a model that was not loaded from a checkpoint."""
    model: Any = trainer.model
    start = str(getattr(model, "adapter_folder", "") or getattr(model.config, "_name_or_path", "") or "")
    if not start:
        return None
    data: Any = trainer.train_dataset
    named = trainer.data_description or type(data).__name__ + (
        f" of {len(data):,} sequences" if has_length(data) else ""
    )
    lengths = (getattr(data, "length", None), getattr(data, "longest", None))
    length = next(filter(None, lengths), getattr(model.config, "training_length", None))
    in_script = sys.argv[0].endswith(".py") and "ipykernel" not in sys.argv[0]
    return RunFacts(
        lineage_of(start),
        DataSource.of(named),
        int(length) if length else trainer.run_record.longest,
        tuple(sys.argv) if in_script else (),
    )


def methods_of(trainer: "InitialStateTrainer", weights: InitialWeights | None = None) -> tuple[Method, ...]:
    """The methods that a trainer applied, the main one first: plain training if all states were zero."""
    about = trainer.about
    if about is not PLAIN and trainer.gives_states and not trainer.run_record.nonzero_starts:
        logger.warning(
            f"All sequences of the {trainer.state.global_step} steps started from the zero state: the lineage records "
            f"plain training, not {about.name}."
        )
        about = PLAIN
    further = {
        OUTPUT_ALIGNMENT: trainer.args.alignment_alpha,
        ATTENTION_WINDOWS: trainer.args.attention_windows,
        MIMETIC_INITIALIZATION: weights is not None and weights.mimetic is not None,
    }
    return (about, *(method for method, used in further.items() if used))


def training_run(trainer: "InitialStateTrainer", output: TrainOutput, facts: RunFacts) -> TrainingRun:
    """The record of a training, from the trainer, what `train` returned, and facts that the trainer cannot know."""
    args, state, record = trainer.args, trainer.state, trainer.run_record
    full, tokens = facts.training_length * record.rows, int(record.tokens)
    if tokens == record.rows * record.longest:  # a block has one token more than targets
        tokens = full
    best = args.load_best_model_at_end and state.best_global_step not in (None, state.global_step)
    last_loss = float(output.training_loss) if record.start < state.global_step else None
    return TrainingRun(
        methods=methods_of(trainer, facts.initial_weights),
        data=facts.data,
        training_length=facts.training_length,
        rows_per_step=args.train_batch_size * args.gradient_accumulation_steps * args.row_processes,
        steps=state.global_step,
        tokens=tokens,
        seconds=record.seconds_before + float(output.metrics["train_runtime"]),
        loss=mean_loss(state.log_history, last_loss, record.starts),
        hardware=_hardware(args),
        settings=record.settings(trainer),
        row_tokens=None if tokens == full else tokens / record.rows,
        adapter=adapter_of(trainer.model),
        initial_weights=facts.initial_weights,
        best_step=state.best_global_step if best else None,
        best_metric=args.metric_for_best_model if best else None,
    )


class RunRecord:
    """The record of a run over all its parts, from resume to resume; checkpoints keep it.

    Args:
        trainer: The trainer of the run.
        checkpoint: The checkpoint from which the run goes on, or None.

    Attributes:
        nonzero_starts: Number of sequences, with TBTT of chunks, that this process started from a nonzero state.
        start, starts: Steps at which this part of the run begins, and all parts.
        rows: Number of sequences of all steps, over all processes.
        tokens: Number of their real tokens.
        longest: Largest length of a batch.
        seconds_before: Seconds of training in the previous parts.
    """

    def __init__(self, trainer: Trainer, checkpoint: str | None = None) -> None:
        saved = {} if checkpoint is None else saved_run(own_file(trainer, checkpoint))["record"]
        self.start = 0 if checkpoint is None else step_of(checkpoint)
        self.starts = (*saved.get("starts", ()), self.start)
        self.seconds_before, self._began = float(saved.get("seconds", 0.0)), time.monotonic()
        self.nonzero_starts: float | Tensor = float(saved.get("given", 0.0))
        self.rows, self.longest = int(saved.get("rows", 0)), int(saved.get("longest", 0))
        self.tokens: int | Tensor = int(saved.get("tokens", 0))
        self._settings = tuple(from_plain(part, Settings) for part in saved.get("settings", ()))

    def note_settings(self, trainer: Trainer) -> None:
        """Note the settings of this part, when optimizer and schedule are made; a new entry where they changed."""
        now = settings(trainer)
        if self._settings:
            last = self._settings[-1]
            now = replace(last, **{name: getattr(now, name) for name in _MAY_CHANGE})
            if now == last:
                return
        self._settings = (*self._settings, replace(now, from_step=self.start))

    def saved(self, trainer: Trainer) -> dict[str, Any]:
        """The record, as the next part reads it from a checkpoint."""
        seconds = self.seconds_before + time.monotonic() - self._began
        read = {"rows": self.rows, "longest": self.longest, "tokens": int(self.tokens)}
        settings = [to_plain(part) for part in self.settings(trainer)]
        kept = {"seconds": seconds, "settings": settings, "starts": list(self.starts)}
        return {"given": float(self.nonzero_starts), **kept, **read}

    def count(self, trainer: Any, batches: Sequence[Mapping[str, Any]]) -> None:
        """Count the sequences of a step and their real tokens, over all processes."""
        args, parts = trainer.args, [batch[MICRO_BATCH] for batch in batches]
        self.rows += len(batches) * args.train_batch_size * args.row_processes
        self.longest = max([self.longest, *(part.length for part in parts)])
        tokens = sum(part.tokens for part in parts)
        if args.world_size > 1:
            tokens = trainer.accelerator.reduce(torch.as_tensor(tokens, device=args.device), "sum")
        self.tokens = self.tokens + tokens // args.context_parallel_size

    def settings(self, trainer: Trainer) -> tuple[Settings, ...]:
        """The settings of the run, with a new entry wherever they changed and a step was made."""
        parts = tuple(part for part in self._settings if part.from_step < trainer.state.global_step)
        return parts or (settings(trainer),)


def mean_loss(log: list[dict[str, float]], otherwise: float | None, starts: Sequence[int] = ()) -> float | None:
    """Mean of the logged training losses, weighted by the steps that each is of; `otherwise` for an empty log.

    An entry is of the steps since the one before, or since the last of the steps `starts` at which the run resumed:
    Trainer forgets the losses between the last entry and the checkpoint.
    """
    total, steps, last = 0.0, 0, 0
    for entry in log:
        if "loss" in entry:
            step = int(entry["step"])
            count = step - max([last, *(start for start in starts if start < step)])
            total, steps, last = total + entry["loss"] * count, steps + count, step
    return total / steps if steps else otherwise


def _hardware(args: TrainingArguments) -> Hardware:
    kind = args.device.type
    if kind == "cpu":
        return Hardware("cpu", args.world_size, torch.get_num_threads())
    name = torch.cuda.get_device_name(args.device) if kind == "cuda" else kind
    return Hardware(name, args.world_size * max(1, args.n_gpu if kind == "cuda" else 1))


def settings(trainer: Trainer) -> Settings:
    """The settings that a repetition of the training needs."""
    args = trainer.args
    groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
    rate = groups[0].get("initial_lr", args.learning_rate) if groups else args.learning_rate
    own_scheduler = getattr(trainer, "user_scheduler", None)
    return Settings(
        from_step=0,
        max_steps=trainer.state.max_steps,
        learning_rate=float(rate),
        lr_scheduler_type=own_scheduler or str(_plain(args.lr_scheduler_type)),
        lr_scheduler_kwargs={} if own_scheduler else _scalars(args.lr_scheduler_kwargs or {}),
        warmup_steps=0.0 if own_scheduler else float(args.warmup_steps),
        max_grad_norm=float(args.max_grad_norm) if args.max_grad_norm else None,
        precision="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        seed=args.seed,
        neftune_noise_alpha=args.neftune_noise_alpha,
        method=_of_method(trainer, args) if isinstance(args, InitialStateConfig) else {},
        others=_of_other(args),
        **_of_optimizer(args, trainer.optimizer, groups),
    )


def _of_optimizer(args: TrainingArguments, optimizer: Any, groups: list[dict[str, Any]]) -> dict[str, Any]:
    name = str(_plain(args.optim))
    betas = args.adam_beta1, args.adam_beta2
    group: dict[str, Any] = {"betas": betas, "eps": args.adam_epsilon, "weight_decay": args.weight_decay}
    if optimizer is not None:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        name = name if kind.lower() in name.replace("_", "") else kind  # an optimizer of the user
        group = groups[0] | {"weight_decay": max(one.get("weight_decay", 0) for one in groups)}
    adam = "betas" in group
    return {
        "optim": name,
        "betas": tuple(float(beta) for beta in group["betas"]) if adam else None,
        "epsilon": float(group["eps"]) if adam and "eps" in group else None,
        "momentum": float(group["momentum"]) if group.get("momentum") else None,
        "weight_decay": float(group["weight_decay"]),
    }


def _of_method(trainer: Any, args: InitialStateConfig) -> dict[str, Value]:
    """Settings of the method that have an effect."""
    used = args.method_settings() | {"bptt_window": trainer.bptt_window}
    unused = () if args.alignment_alpha else "alignment_"
    shown = {name: value for name, value in used.items() if name not in _NO_EFFECT and not name.startswith(unused)}
    return {name: _plain(value) for name, value in shown.items() if value is not None}


def _of_other(args: TrainingArguments) -> dict[str, Value]:
    """Settings, other than defaults, of the trainer that a method is combined with, such as SFTTrainer."""
    known = {item.name for item in fields(TrainingArguments)}
    if isinstance(args, InitialStateConfig):
        known |= set(args.method_settings())
    others = {item.name: (getattr(args, item.name), item.default) for item in fields(args) if item.name not in known}
    return {
        name: _plain(value)
        for name, (value, default) in others.items()
        if value is not None and (default is MISSING or value != default)
    }


def _plain(value: Any) -> Value:
    if isinstance(value, Mapping):
        return {str(name): _scalars(one) if isinstance(one, Mapping) else _scalar(one) for name, one in value.items()}
    return tuple(map(_scalar, value)) if isinstance(value, list | tuple) else _scalar(value)


def _scalars(values: Any) -> dict[str, Scalar]:
    return {str(name): _scalar(value) for name, value in values.items()}


def _scalar(value: Any) -> Scalar:
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return portable(value if isinstance(value, str) else json.dumps(value, default=str))
