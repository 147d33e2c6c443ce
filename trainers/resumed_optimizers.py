"""What an optimizer and its schedule do at a resume: their state is the checkpoint's, their settings those given now.

Loading the state of an optimizer or of a schedule also brings back the settings that they were saved with. Here those
are put back to what they were made with, so that arguments that change at a resume (learning rate, betas, weight
decay) apply from there on.
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

_NOT_SETTINGS = ("params", "param_names", "lr", "foreach", "fused", "capturable", "differentiable")
"""Of the groups of an optimizer; the last four belong to the tensors of its state."""


def group_settings(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of each group of parameters: initial_lr, betas, weight_decay, ..."""
    return [
        {name: value for name, value in group.items() if name not in _NOT_SETTINGS} for group in optimizer.param_groups
    ]


def check_same_kind(checkpoint: str | os.PathLike[str], optimizer: Any, scheduler: Any, args: Any) -> None:
    """Raise a `ValueError` if the optimizer or schedule saved in a checkpoint has other settings, by name."""
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
            f"Cannot resume from {checkpoint} with {argument} {getattr(value, 'value', value)}: what is saved there "
            f"has {', '.join(lost)}, this one {', '.join(new)}. Give the {argument} of that run, or load the weights "
            "with from_pretrained and start a new run."
        )


def put_back(optimizer: Any, scheduler: Any, groups: list[dict[str, Any]], rates_changed: bool) -> None:
    """Give the groups the settings of `group_settings` again, and the learning rates that the schedule makes of them.

    Raises:
        ValueError: if the learning rate or the schedule changed (`rates_changed`) and it is no function of the step.
    """
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        rates_changed |= bool(group.get("initial_lr") != wanted.get("initial_lr"))
        group.update(wanted)
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
            f"{type(scheduler).__name__} keeps its own learning rate, so a resume cannot change it: give the "
            "learning_rate and schedule of the first part, or load the weights with from_pretrained and start a new "
            "run."
        )
