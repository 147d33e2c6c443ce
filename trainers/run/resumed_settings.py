"""`Trainer` takes other arguments at a resume without a word, and loads the old settings of optimizer and schedule.

Here an argument that is part of the run is compared, and every setting whose argument
changed is set to the new value, so that arguments that may change (learning rate, betas, weight decay) apply from then
on. The other settings stay as loaded, because a schedule or a callback may have moved them, as OneCycleLR moves betas.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

APPLIED = {
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps"),
    *("num_train_epochs", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("bf16", "fp16", "neftune_noise_alpha"),
}
"""Apply from the resumed step on, as log and lineage say (`RunRecord`). Another kind of optimizer is refused there."""
WATCHING = {
    *("output_dir", "logging_dir", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node"),
    *("logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm"),
    *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only"),
    *("eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
    *("include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "save_only_model"),
    *("save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "enable_jit_checkpoint"),
    *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
    *("hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("restore_callback_states_from_checkpoint", "resume_from_checkpoint", "debug", "skip_memory_metrics"),
    *("do_train", "do_eval", "do_predict"),
}
"""Where results go, how a run is followed, and which of its weights are kept at the end."""
COMPUTING = {
    *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("use_liger_kernel", "liger_kernel_config", "tf32", "use_cpu", "full_determinism", "use_cache"),
    *("torch_empty_cache_steps", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    *("ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "dataset_num_proc"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_drop_last"),
}
"""Time, memory and rounding. (Training always drops the last rows; of streams, what was read is compared.)"""
MAY_CHANGE = APPLIED | WATCHING | COMPUTING
_NOT_SETTINGS = ("params", "param_names", "lr", "foreach", "fused", "capturable", "differentiable")
"""Entries of an optimizer's groups that are not settings; the last four belong to the tensors of its state."""
_MADE_WITH: WeakKeyDictionary[Any, list[dict[str, Any]]] = WeakKeyDictionary()
"""Kept outside the optimizers, whose groups only hold the current values of the settings."""


def fixed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The values of all arguments that may not change, as they come back from JSON."""
    return {
        item.name: as_json(_plain(getattr(args, item.name))) for item in fields(args) if item.name not in MAY_CHANGE
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return value.to_dict() if hasattr(value, "to_dict") else value


def remember_settings(optimizer: Any, new_run: bool) -> None:
    """Note the settings that an optimizer starts with; a resume keeps those noted before."""
    if new_run or optimizer not in _MADE_WITH:
        _MADE_WITH[optimizer] = _settings(optimizer)


def made_with(optimizer: Any) -> list[dict[str, Any]]:
    """The settings that each group started with (initial_lr, betas, weight_decay, ...); if not noted, the current."""
    return _MADE_WITH.get(optimizer) or _settings(optimizer)


def made_before(optimizer: Any, recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that each group of an optimizer started with in the run that saved it.

    Args:
        optimizer: The optimizer, as loaded.
        recorded: What `made_with` returned in that run.
    """
    return [held | made for held, made in zip(_settings(optimizer), recorded, strict=True)]


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name not in _NOT_SETTINGS} for group in optimizer.param_groups
    ]


def check_same_kind(checkpoint: str | os.PathLike[str], optimizer: Any, scheduler: Any, args: Any) -> None:
    """Raise a `ValueError` if the names of the settings of a saved optimizer or schedule differ."""
    path = Path(checkpoint) / "optimizer.pt"
    if path.is_file():  # else it is sharded, by FSDP
        groups = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["param_groups"]
        _check_names(checkpoint, "optim", args.optim, groups[0], optimizer.param_groups[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on when to save a schedule
        own = scheduler.state_dict()
    saved = torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
    _check_names(checkpoint, "lr_scheduler_type", args.lr_scheduler_type, saved, own)


def _check_names(checkpoint: Any, argument: str, value: Any, saved: dict[str, Any], own: Mapping[str, Any]) -> None:
    lost, new = sorted(saved.keys() - own.keys()), sorted(own.keys() - saved.keys())
    if lost and new:
        raise ValueError(
            f"Cannot resume from {checkpoint} with {argument} {getattr(value, 'value', value)}: the saved state has "
            f"{', '.join(lost)}, but this one has {', '.join(new)}. Give the {argument} of that run, or load the "
            "weights with from_pretrained and start a new run."
        )


def apply_changes(optimizer: Any, scheduler: Any, before: list[dict[str, Any]], rates_changed: bool) -> None:
    """Apply the settings of an optimizer that differ from those before, and the learning rates of the schedule.

    Args:
        optimizer: The optimizer, as loaded.
        scheduler: Its schedule, as loaded.
        before: From `made_before`.
        rates_changed: Whether the learning rate or the schedule changed.

    Raises:
        ValueError: if the learning rate or the schedule changed and the schedule is not a function of the step.
    """
    groups = made_with(optimizer)
    for group, old, new in zip(optimizer.param_groups, before, groups, strict=True):
        rates_changed |= bool(group.get("initial_lr") != new.get("initial_lr"))
        group.update({name: _changed(group.get(name), old.get(name), value) for name, value in new.items()})
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        rates = [
            rate * factor(scheduler.last_epoch)
            for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        scheduler._last_lr = rates
    elif rates_changed:
        raise ValueError(
            f"{type(scheduler).__name__} keeps its own learning rate, so a resume cannot change it: set the "
            "learning_rate and schedule of the first part, or load the weights with from_pretrained and start a new "
            "run."
        )


def _changed(held: Any, before: Any, now: Any) -> Any:
    """`now` if it differs from `before`, else the value `held`; for sequences, element by element."""
    if all(isinstance(value, list | tuple) for value in (held, before, now)) and len(held) == len(before) == len(now):
        return type(now)(map(_changed, held, before, now))
    return held if as_json(before) == as_json(now) else now


def as_json(value: Any) -> Any:
    """A setting as it comes back from JSON: tensors as numbers, tuples as lists, other types as strings."""
    return json.loads(
        json.dumps(value, default=lambda other: other.tolist() if torch.is_tensor(other) else str(other))
    )
