"""Which training arguments may change at a resume; all others are part of the run, and a change is refused."""

from dataclasses import fields
from enum import Enum
from typing import Any

from transformers import TrainingArguments

from hf_recurrent_lengthgen.trainers.resumed_optimizers import as_json

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


def fixed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The values of all arguments that may not change, as they come back from JSON."""
    return {
        item.name: as_json(_plain(getattr(args, item.name))) for item in fields(args) if item.name not in MAY_CHANGE
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return value.to_dict() if hasattr(value, "to_dict") else value
