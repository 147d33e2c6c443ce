"""`Trainer` neither saves atomically nor keeps the state of a method: the file of each process, and what is complete.

Each process writes its file of initial states, with what a resumed run must share, into the checkpoint before Trainer
writes its own files. `trainer_state.json` is removed before a save, and Trainer writes it when its other files are
written. So a folder with a parsable `trainer_state.json` and the files of every process is complete.
"""

import copy
import functools
import hashlib
import json
import os
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from hf_recurrent_lengthgen.checkpoints.adapters import adapter_folder, holds_adapter
from hf_recurrent_lengthgen.checkpoints.records import Lineage
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.data.packing import sampled_digest
from hf_recurrent_lengthgen.evaluation.json_schema import to_plain
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window
from hf_recurrent_lengthgen.models.state_on_disk import replacing

TRAINER_STATE_FILE = "trainer_state.json"
FORMAT, FORMAT_VERSION = "initial_states", 1
STOCK = {item.name for item in fields(TrainingArguments)}

FIXED = {
    *("seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy"),
    *("length_column_name", "remove_unused_columns", "label_names", "accelerator_config", "parallelism_config"),
    *("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("average_tokens_across_devices", "fsdp", "fsdp_config", "deepspeed"),
}
"""Arguments of Trainer that a resume may not change: they decide the data or their order, or come with the optimizer.
Nor may settings of methods change, and those of trainers that they are combined with (`fixed_arguments`)."""


def initial_states_file(checkpoint: str | os.PathLike[str], process_index: int) -> Path:
    """Path of one process's initial states in a checkpoint."""
    return Path(checkpoint) / f"initial_states_{process_index}.safetensors"


def fixed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that a resume may not change, as they come back from JSON."""
    names = [item.name for item in fields(args) if item.name in FIXED or item.name not in STOCK]
    return {name: as_json(getattr(args, name)) for name in names}


def default_settings(args: TrainingArguments) -> dict[str, Any]:
    """The defaults of settings of methods, as they come back from JSON."""
    own = [item for item in fields(args) if item.name not in STOCK and item.default is not MISSING]
    return {item.name: as_json(item.default) for item in own}


def as_json(value: Any) -> Any:
    """A setting as it comes back from JSON: tuples as lists, choices as their values, other types as strings."""
    if isinstance(value, Enum):
        value = value.value
    return json.loads(json.dumps(value.to_dict() if hasattr(value, "to_dict") else value, default=str))


def save_initial_states(path: Path, tensors: dict[str, Tensor], run: dict[str, Any]) -> None:
    """Write named tensors and what they depend on (source, processes, batch size) atomically."""
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "run": json.dumps(run)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, header)


def load_initial_states(path: Path, run: dict[str, Any]) -> dict[str, Tensor]:
    """Read what `save_initial_states` wrote.

    Raises:
        ValueError: if the file is missing, damaged, of a newer format, or from a run that differs in `run`.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, so this run cannot be resumed exactly. The checkpoint may be from another trainer or "
            "from fewer processes: load its weights with from_pretrained and start a new run instead."
        )
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): resume from an earlier checkpoint.") from error
    version = header.get("format_version", "")
    if header.get("format") != FORMAT or not version.isdecimal() or int(version) > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {header.get('format')!r} version {version!r}, this code reads {FORMAT!r} up to "
            f"version {FORMAT_VERSION}."
        )
    saved = json.loads(header.get("run", "{}"))
    changed = {
        key: (saved.get(key), run[key]) for key in run.keys() - {"arguments", "defaults"} if saved.get(key) != run[key]
    }
    now = run.get("arguments", {})
    before = run.get("defaults", {}) | saved.get("arguments", {})  # older versions lack those that came later
    changed |= {key: (before[key], now[key]) for key in now.keys() & before.keys() if before[key] != now[key]}
    if changed:
        pairs = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in sorted(changed.items()))
        raise ValueError(
            f"Cannot resume exactly from {path.parent}: {pairs}. Restore the old value, or start a new run from its "
            "weights (--model, or from_pretrained)."
        )
    return tensors


def saved_run(path: Path) -> dict[str, Any]:
    """The `run` that `save_initial_states` wrote into a file."""
    with safe_open(os.fspath(path), framework="pt") as file:
        run: dict[str, Any] = json.loads((file.metadata() or {}).get("run", "{}"))
    return run


def what_is_missing(checkpoint: str | os.PathLike[str]) -> str | None:
    """Why a checkpoint folder cannot be resumed from, or None if it is complete."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        TrainerState.load_from_json(os.fspath(folder / TRAINER_STATE_FILE))
    except FileNotFoundError:
        return f"{TRAINER_STATE_FILE} is missing: the save was interrupted, or this is not a checkpoint of a Trainer"
    except (ValueError, TypeError) as error:
        return f"{TRAINER_STATE_FILE} cannot be read ({error}): the save was interrupted"
    first = initial_states_file(folder, 0)
    if not first.is_file():
        return (
            f"{first.name} is missing: another trainer wrote it, or save_only_model left it out; its weights can be "
            "loaded with from_pretrained to start a new run"
        )
    try:
        processes = saved_run(first).get("num_processes", 1)
    except SafetensorError as error:
        return f"{first.name} is damaged ({error})"
    names = [initial_states_file(folder, index).name for index in range(processes)]
    names += [f"rng_state_{index}.pth" for index in range(processes)] if processes > 1 else ["rng_state.pth"]
    missing = [name for name in (*names, "scheduler.pt") if not (folder / name).is_file()]
    if not any(folder.glob("optimizer*")) and not any(folder.glob("global_step*")):  # global_step*: DeepSpeed
        missing.append("optimizer.pt")
    return f"missing: {', '.join(missing)}" if missing else None


def checkpoints_of(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoint folders of a run by step, the highest first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {path.name.removeprefix(prefix): path for path in Path(output_dir).glob(f"{prefix}*")}
    return dict(sorted(((int(step), path) for step, path in steps.items() if step.isdecimal()), reverse=True))


def newest_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint folder (see `what_is_missing`) of the highest step."""
    return next((path for path in checkpoints_of(output_dir).values() if what_is_missing(path) is None), None)


def checkpoint_to_resume(requested: str | os.PathLike[str] | Literal[True], output_dir: str | os.PathLike[str]) -> str:
    """The `requested` checkpoint folder, or with True the newest one that is complete.

    Raises:
        ValueError: if there is none, or if the requested one is incomplete.
    """
    newest = newest_complete_checkpoint(str(output_dir))
    if requested is not True:
        if wrong := what_is_missing(requested):
            raise ValueError(
                f"Cannot resume from {requested}: {wrong}. The newest complete checkpoint in {output_dir} is {newest}."
            )
        return os.fspath(requested)
    if newest is None:
        raise ValueError(
            f"There is no complete checkpoint in {output_dir} to resume from: leave out --resume, or "
            "resume_from_checkpoint in Python."
        )
    return os.fspath(newest)


def load_converted_weights(model: nn.Module, checkpoint: str | os.PathLike[str]) -> bool:
    """Load, in place, weights of a checkpoint whose names in the files are not those of the model.

    Transformers writes several models (most with experts, all of Nemotron-H) in the layout in which they were
    published. `from_pretrained` reads that layout; `Trainer` goes by names of the model and skips it, with a warning.

    Returns:
        Whether the checkpoint has such a layout; if not, nothing was loaded.

    Raises:
        ValueError: if the weights do not fit the model.
    """
    names: set[str] = set()
    for path in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(os.fspath(path), framework="pt") as file:
            names.update(file.keys())
    if not isinstance(model, PreTrainedModel) or names <= model.state_dict().keys():
        return False
    from hf_recurrent_lengthgen.hybrids.layer_sizes import loading_class  # these models are hybrids

    dtype = functools.reduce(torch.promote_types, {value.dtype for value in model.parameters()})
    loading: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": dtype}
    load: Any = loading_class(model).from_pretrained
    loaded, misfits = load(checkpoint, config=copy.deepcopy(model.config), **loading)
    if any(misfits[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"The weights in {checkpoint} do not fit this {type(model).__name__}: {misfits}.")
    model.load_state_dict(loaded.state_dict())
    return True


def best_folder(model: Any, best: str) -> str:
    """The folder of the best checkpoint with the weights; Trainer looks for an adapter without a name of its own."""
    adapter = adapter_folder(best, model)
    return os.fspath(adapter) if holds_adapter(adapter) else best


def own_file(trainer: Any, checkpoint: str | os.PathLike[str]) -> Path:
    """The file of initial states of this process."""
    return initial_states_file(checkpoint, trainer.args.process_index)


def description_of(model: Any) -> str:
    """Class and size of a model."""
    return f"{type(model).__name__} with {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def run_of(trainer: Any) -> dict[str, Any]:
    """What a resumed run must share."""
    order = order_of(trainer)
    return {
        "model": trainer.model_description,
        "attention_window": attention_window(trainer.model),
        **({} if trainer.facts is None else {"start": _digest_of(trainer.facts.start)}),
        "source": type(trainer.initial_states).__name__,
        **trainer.initial_states.settings(),
        **layout_of(trainer.train_dataset),
        **({} if order is None else {"train_dataset.order": order}),
        "num_processes": trainer.args.world_size,
        "arguments": fixed_arguments(trainer.args),
        "defaults": default_settings(trainer.args),
    }


def order_of(trainer: Any) -> str | None:
    """The order of sequences, where it is not Trainer's, and was another before checkpoints named it."""
    if isinstance(trainer.train_dataset, IterableDataset):
        return "passes one after the other, each read by all data workers"
    return "by length, of seed and epoch" if trainer.args.train_sampling_strategy == "group_by_length" else None


def layout_of(dataset: Any) -> dict[str, Any]:
    """What the data of a resumed run must share: the number of sequences, the `resume_record` if there is one, and for
    `ContinuedChunks` their text and layout."""
    if not isinstance(dataset, ContinuedChunks):
        rows = {"train_dataset.rows": len(dataset)} if has_length(dataset) else {}
        return {**rows, "train_dataset.record": getattr(dataset, "resume_record", None)}
    names = ("length", "chunks_before_reset", "reset_at_document", "lookahead")
    layout = {f"train_dataset.{name}": getattr(dataset, name) for name in names}
    layout["train_dataset.tokens"] = len(dataset.stream)
    layout["train_dataset.digest"] = sampled_digest(dataset.stream)
    return layout


def save_states(trainer: Any, checkpoint: str | os.PathLike[str]) -> None:
    """Begin a checkpoint: the file of this process.

    Raises:
        ValueError: for trained weights that are NaN or infinite, so that good checkpoints remain.
    """
    trained = [(name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    parts = ((name, getattr(weight.detach(), "to_local", weight.detach)()) for name, weight in trained)
    broken = next((name for name, part in parts if not bool(part.isfinite().all())), None)
    if trainer.any_process(broken is not None):
        raise ValueError(
            f"The weights after step {trainer.state.global_step} have NaN or infinite values, first in {broken}: no "
            f"checkpoint is written. {hint(trainer.args.output_dir)} Lower the learning rate, or look for what makes "
            "gradients NaN."
        )
    if trainer.args.should_save:
        Path(checkpoint, TRAINER_STATE_FILE).unlink(missing_ok=True)  # incomplete until Trainer writes it
    trainer.accelerator.wait_for_everyone()
    path = own_file(trainer, checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    run = run_of(trainer) | {"record": trainer.run_record.saved(trainer)}
    save_initial_states(path, trainer.initial_states.state_dict(), run)


def chosen_checkpoint(trainer: Any, requested: str | bool | None) -> str | None:
    """The folder to resume from, chosen by the main process for all processes; None for a new run.

    Raises:
        ValueError: if there is none, or for another run. Trainer has loaded nothing into the model by then.
    """
    if not requested:
        return None
    chosen: list[str | None] = [None, None]  # the folder, and why there is none
    if trainer.is_world_process_zero():
        try:
            chosen[0] = checkpoint_to_resume(requested, str(trainer.args.output_dir))
        except ValueError as error:
            chosen[1] = str(error)
    checkpoint, refused = broadcast_object_list(chosen)
    if refused is not None:
        raise ValueError(refused)
    load_initial_states(own_file(trainer, checkpoint), run_of(trainer))
    if trainer.is_world_process_zero():
        print(f"Resuming from {checkpoint}, after step {step_of(checkpoint)}.", flush=True)
    return str(checkpoint)


def load_states(trainer: Any) -> None:
    """Load the states of a resumed run into its source, once Trainer has loaded all else."""
    if trainer.resumed is not None:
        tensors = load_initial_states(own_file(trainer, trainer.resumed), run_of(trainer))
        trainer.initial_states.load_state_dict(tensors, trainer.args.device)


def step_of(checkpoint: str | os.PathLike[str]) -> int:
    """Steps that were done when a checkpoint was written."""
    return TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_FILE)).global_step


def _digest_of(start: Lineage) -> str | None:
    """Digest of the weights that training starts from, independent of their path; None for random weights."""
    if start.source is None:
        return None
    made = [start.source.files, [to_plain(step) for step in start.steps]]
    return hashlib.blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=8).hexdigest()


def hint(output_dir: Any) -> str:
    """How to continue a run that ends now, in a sentence."""
    newest = newest_complete_checkpoint(str(output_dir))
    if newest is None:
        return f"There is no complete checkpoint in {output_dir} yet."
    return f"The newest complete checkpoint is {newest}: train(resume_from_checkpoint=True) continues from it."
