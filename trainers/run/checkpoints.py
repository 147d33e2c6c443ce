"""`Trainer` does not save atomically: which checkpoints are complete, and the file of initial states in them.

A process killed during a save leaves a folder from which Trainer would then try to resume. Here each process writes
its file of initial states atomically after all its other files, and `trainer_state.json` is removed before a save and
written when all processes are done. So a folder with a parsable `trainer_state.json` and the file of every process is
complete.
"""

import copy
import functools
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_recurrent_lengthgen.models.state_on_disk import replacing

TRAINER_STATE_FILE = "trainer_state.json"
FORMAT, FORMAT_VERSION = "initial_states", 1


def initial_states_file(checkpoint: str | os.PathLike[str], process_index: int) -> Path:
    """Path of one process's initial states in a checkpoint."""
    return Path(checkpoint) / f"initial_states_{process_index}.safetensors"


def save_initial_states(path: Path, tensors: dict[str, Tensor], run: dict[str, Any]) -> None:
    """Write named tensors and what they depend on (source, processes, batch size) atomically."""
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "run": json.dumps(run)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, header)


def load_initial_states(
    path: Path, run: dict[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Read what `save_initial_states` wrote; an argument that it does not name had its default, if those are given.

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
    changed = {key: (saved.get(key), run[key]) for key in run.keys() - {"arguments"} if saved.get(key) != run[key]}
    before, now = saved.get("arguments", {}), run.get("arguments", {})  # each of its own versions
    before = {**defaults, **before} if before and defaults else before
    changed |= {key: (before[key], now[key]) for key in now.keys() & before.keys() if before[key] != now[key]}
    if changed:
        pairs = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in sorted(changed.items()))
        raise ValueError(
            f"Cannot resume exactly from {path.parent}: {pairs}. Restore the old value, or load the weights with "
            "from_pretrained and start a new run."
        )
    return tensors


def saved_run(path: Path) -> dict[str, Any]:
    """The `run` that `save_initial_states` wrote into a file."""
    with safe_open(os.fspath(path), framework="pt") as file:
        run: dict[str, Any] = json.loads((file.metadata() or {}).get("run", "{}"))
    return run


def begin_save(checkpoint: str | os.PathLike[str]) -> None:
    """Mark a folder as incomplete before a save, and remove the leftovers of an interrupted one."""
    folder = Path(checkpoint)
    (folder / TRAINER_STATE_FILE).unlink(missing_ok=True)
    for leftover in folder.glob(".initial_states_*.tmp"):
        leftover.unlink()


def _is_safetensors(path: Path) -> bool:
    try:
        with safe_open(os.fspath(path), framework="pt"):
            return True
    except SafetensorError:
        return False


_READERS: dict[str, Callable[[Path], bool]] = {
    ".safetensors": _is_safetensors,
    ".pt": zipfile.is_zipfile,
    ".pth": zipfile.is_zipfile,
}
"""Whether a file of this kind is complete, from its header or from the directory at the end of a zip archive."""


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
    names.append("scheduler.pt")
    missing = [name for name in names if not (folder / name).is_file()]
    if not any(folder.glob("optimizer*")) and not any(folder.glob("global_step*")):  # global_step*: DeepSpeed
        missing.append("optimizer.pt")
    if missing:
        return f"missing: {', '.join(missing)}"
    damaged = [path.name for path in folder.iterdir() if path.suffix in _READERS and not _READERS[path.suffix](path)]
    return f"damaged or cut off: {', '.join(sorted(damaged))}" if damaged else None


def checkpoints_of(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoint folders of a run by step, the highest first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {path.name.removeprefix(prefix): path for path in Path(output_dir).glob(f"{prefix}*")}
    return dict(sorted(((int(step), path) for step, path in steps.items() if step.isdecimal()), reverse=True))


def newest_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint folder (see `what_is_missing`) of the highest step."""
    return next((path for path in checkpoints_of(output_dir).values() if what_is_missing(path) is None), None)


def checkpoint_to_resume(asked: str | os.PathLike[str] | Literal[True], output_dir: str | os.PathLike[str]) -> str:
    """The checkpoint folder `asked` for, or with True the newest one that is complete.

    Raises:
        ValueError: if there is none, or if the one asked for is incomplete.
    """
    newest = newest_complete_checkpoint(output_dir)
    if asked is not True:
        if wrong := what_is_missing(asked):
            raise ValueError(
                f"Cannot resume from {asked}: {wrong}. The newest complete checkpoint in {output_dir} is {newest}."
            )
        return os.fspath(asked)
    if newest is None:
        raise ValueError(f"There is no complete checkpoint in {output_dir}: train without resume_from_checkpoint.")
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
