"""`Trainer` takes other arguments at a resume without a word, and loads the old learning rates.

Here an argument that is part of the run is compared, and a new learning rate or number of steps applies from then on.
The other settings of the optimizer stay as loaded: a schedule may have moved them, as OneCycleLR moves betas.
"""

import json
from dataclasses import fields
from enum import Enum
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from hf_recurrent_lengthgen.trainers.settings import defaults_of

APPLIED = {
    *("learning_rate", "warmup_steps", "warmup_ratio", "max_steps", "num_train_epochs", "max_grad_norm"),
    *("bf16", "fp16", "neftune_noise_alpha"),
}
"""Apply from the resumed step on, as log and lineage say (`RunRecord`)."""
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


def fixed_arguments(args: TrainingArguments, defaults: bool = False) -> dict[str, Any]:
    """The values of all arguments that may not change, or the `defaults` of these, as they come back from JSON."""
    values = defaults_of(args) if defaults else {item.name: getattr(args, item.name) for item in fields(args)}
    return {name: as_json(value) for name, value in values.items() if name not in MAY_CHANGE}


def initial_rates(optimizer: Any) -> list[Any]:
    """The learning rate from which each group of an optimizer starts."""
    return [group.get("initial_lr") for group in optimizer.param_groups]


def apply_rates(optimizer: Any, scheduler: Any, rates: list[Any], changed: bool) -> None:
    """Apply learning rates and schedule to a run that is resumed; those of Trainer would be the loaded ones.

    Args:
        optimizer: The optimizer, as loaded.
        scheduler: Its schedule, as loaded.
        rates: Its `initial_rates` before it was loaded.
        changed: Whether the record of the run names another learning rate.

    Raises:
        ValueError: if the learning rate changed and the schedule is not a function of the step.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = rates
        now = [rate * factor(scheduler.last_epoch) for rate, factor in zip(rates, scheduler.lr_lambdas, strict=True)]
        for group, initial, rate in zip(optimizer.param_groups, rates, now, strict=True):
            group["initial_lr"] = initial
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        scheduler._last_lr = now
    elif changed or initial_rates(optimizer) != rates:
        raise ValueError(
            f"{type(scheduler).__name__} keeps its own learning rate, so a resume cannot change it: set the "
            "learning_rate of the first part, or load the weights with from_pretrained and start a new run."
        )


def as_json(value: Any) -> Any:
    """A setting as it comes back from JSON: tuples as lists, choices as their values, other types as strings."""
    if isinstance(value, Enum):
        value = value.value
    return json.loads(json.dumps(value.to_dict() if hasattr(value, "to_dict") else value, default=str))
