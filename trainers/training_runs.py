"""What was trained, with what, and how much of it: the record of a finished training."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_recurrent_lengthgen.lineage import lineage_of, record_step
from hf_recurrent_lengthgen.records import TrainingRun, portable
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer

logger = logging.get_logger(__name__)

_NO_EFFECT = ("assume_shuffled", "broken_states", "max_state_rms")
"""Settings that refuse or allow, and change nothing of what is trained."""


def record_lineage(trainer: "InitialStateTrainer", output: TrainOutput, folder: str | os.PathLike[str]) -> None:
    """Write the lineage of a model that a trainer was given, trained and saved, from what both know.

    Nothing is written where a model does not say which checkpoint it was loaded from, and for adapters.
    """
    model: Any = trainer.model
    start = str(getattr(model.config, "_name_or_path", "") or "")
    if not start or not (Path(folder) / "config.json").is_file():
        return
    args = trainer.args
    alignment = [f"output alignment {args.alignment_alpha:g}"] if args.alignment_alpha else []
    method = " with ".join([*([trainer.method] if trainer.method != "none" else []), *alignment])
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
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return TrainingRun(
        method,
        data,
        steps,
        length * rows_seen(steps, rows, _length(trainer.train_dataset), args.dataloader_drop_last),
        float(output.metrics["train_runtime"]),
        mean_loss(trainer.state.log_history, float(output.training_loss)),
        hardware(args),
        {"batch": f"{rows:,} rows of {length:,} tokens"} | settings(args) | (further or {}),
    )


def rows_seen(steps: int, rows: int, dataset: int | None, drop_last: bool = False) -> int:
    """Rows of all steps together: the last step of an epoch has fewer.

    Args:
        steps: Optimizer steps.
        rows: Rows of a step, over accumulation steps and processes.
        dataset: Rows of an epoch; None if it has no length.
        drop_last: Whether an incomplete last batch is left out.
    """
    if dataset is None or drop_last or dataset < 1:
        return steps * rows
    epochs, rest = divmod(steps, -(-dataset // rows))
    return epochs * dataset + rest * rows


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


def settings(args: TrainingArguments) -> dict[str, str]:
    """The settings that a repetition needs, by name, as text."""
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if args.lr_scheduler_kwargs:
        schedule += f" {json.dumps(args.lr_scheduler_kwargs)}"
    warmup = f"{args.warmup_steps:g} steps" if args.warmup_steps >= 1 else f"{args.warmup_steps:.0%} of the steps"
    optimizer = str(getattr(args.optim, "value", args.optim))
    found = {
        "learning rate": f"{args.learning_rate:g}",
        "schedule": f"{schedule}, warm-up {warmup}" if args.warmup_steps else schedule,
        "optimizer": f"{optimizer}, betas {args.adam_beta1:g} and {args.adam_beta2:g}, "
        f"weight decay {args.weight_decay:g}",
        "gradient norm": f"at most {args.max_grad_norm:g}" if args.max_grad_norm else "any",
        "precision": "bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else "float32",
        "seed": str(args.seed),
    }
    return found | (_of_method(args) if isinstance(args, InitialStateConfig) else {})


def _of_method(args: InitialStateConfig) -> dict[str, str]:
    """Settings of the method that are on."""
    left_out = {*_NO_EFFECT, *(() if args.alignment_alpha else ("alignment_alpha", "alignment_min_extra"))}
    given = {name: value for name, value in args.method_settings().items() if name not in left_out}
    return {
        name.replace("_", " "): portable(value) if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
        if value is not None
    }


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
