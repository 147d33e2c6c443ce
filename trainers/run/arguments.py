"""`Trainer` mixes or drops states under some of its arguments, which are refused with the reason.

Such are DataParallel, reentrant checkpointing and the policy of FSDP; under others, several processes would not train
the weights that one would.
"""

import dataclasses
import os
from typing import Any

from transformers import TrainingArguments

REFUSED = {
    "auto_find_batch_size": "carried states belong to one batch size",
    "label_smoothing_factor": "Trainer would smooth against unshifted labels",
    "ignore_data_skip": "a resumed run would read the rows of its epoch from the first one again",
}
"""Arguments that have to be false, with the reason."""


def check_config(trainer: type[Any], args: Any) -> None:
    """Raise a `ValueError` for arguments that are not of the trainer's own config class."""
    if not isinstance(args, trainer.config_class):
        raise ValueError(
            f"{trainer.__name__} needs args of class {trainer.config_class.__name__}, which has all fields of "
            f"TrainingArguments; got {type(args).__name__}."
        )


def check_arguments(args: TrainingArguments) -> None:
    """Raise a `ValueError` for arguments under which states would be lost or mixed up."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process (DataParallel) would mix up carried states: start one process per GPU "
            "with accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    if args.fp16 and args.device.type == "cpu":
        raise ValueError(
            "fp16 needs a GPU: on a CPU accelerate would compute in float32 without a word. Leave it out, or set bf16."
        )
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"{name} is not supported, because {reason}: leave it out.")
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (getattr(args, name, None) or {}).get("use_reentrant"):
            raise ValueError(
                "Reentrant activation checkpointing loses gradients through recurrent states: set use_reentrant=False."
            )
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError("split_batches in accelerator_config would make batches smaller than said: leave it out.")
    if not args.dataloader_in_order and args.dataloader_num_workers > 1:
        raise ValueError("dataloader_in_order=False gives batches in an order that no run repeats: leave it out.")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > args.world_size:
        raise ValueError(
            f"{started} processes were started, but each one runs by itself and would train on all of the data: "
            "without GPUs, set use_cpu=True."
        )
    if args.world_size > 1:
        _check_same_on_processes(args)


def _check_same_on_processes(args: TrainingArguments) -> None:
    """Raise a `ValueError` for arguments with which several processes would not train the weights that one would."""
    if not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False would make the weight of a token depend on the other tokens of its "
            "process: leave it out."
        )
    for name in ("even_batches", "use_seedable_sampler"):
        if getattr(args.accelerator_config, name, None) is False:
            raise ValueError(
                f"{name}=False in accelerator_config gives {args.world_size} processes other rows than one: leave it "
                "out."
            )
    strategy = args.train_sampling_strategy
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy {strategy!r} orders rows by the batches of one process, so {args.world_size} "
            "processes would see other batches than a single process: leave it out, or train with one process."
        )


def keep_states_in_full_precision(accelerator_state: Any) -> None:
    """Make FSDP cast weights but not states, which its default policy would cast at every module.

    Raises:
        ValueError: for FSDP version 1, which is untested with states.
    """
    plugin = getattr(accelerator_state, "fsdp_plugin", None)
    if plugin is None:
        return
    if getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError("FSDP version 1 is not supported: set fsdp_version: 2 in the accelerate config.")
    policy = plugin.mixed_precision_policy
    if policy is not None and getattr(policy, "cast_forward_inputs", False):
        plugin.mixed_precision_policy = dataclasses.replace(policy, cast_forward_inputs=False)
