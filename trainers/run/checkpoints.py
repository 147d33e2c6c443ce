"""`Trainer` does not save atomically: which checkpoints are complete, and the file of initial states in them.

A process killed during a save leaves a folder from which Trainer would then try to resume. Here each process writes
its file of initial states atomically after all its other files, and `trainer_state.json` is removed before a save and
written when all processes are done. So a folder with a parsable `trainer_state.json` and the file of every process is
complete. The file of digests, written last, tells whether the other files still have the content that was written.
"""

import copy
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.records import file_digest
from hf_recurrent_lengthgen.models.state_on_disk import replacing

logger = logging.get_logger(__name__)

TRAINER_STATE_FILE = "trainer_state.json"
DIGESTS_FILE = "digests.sha256"  # as `sha256sum --check` reads it
EDITED = {".json", ".md", ".py", ".txt"}
"""Text files, which people and cards may edit; only `trainer_state.json` among them has a digest."""
FORMAT, FORMAT_VERSION = "initial_states", 1
NOT_IN_OLD_CHECKPOINTS = {
    *(
        "arguments",
        "start",
        "train_dataset.record",
        "alignment_divergence",
        "alignment_second_state",
        "context_parallel_size",
    ),
}
"""Entries that files of the first versions lack; a missing one is not compared."""


def initial_states_file(checkpoint: str | os.PathLike[str], process_index: int) -> Path:
    """Path of one process's initial states in a checkpoint."""
    return Path(checkpoint) / f"initial_states_{process_index}.safetensors"


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
    known = {key: value for key, value in run.items() if key in saved or key not in NOT_IN_OLD_CHECKPOINTS}
    changed = {key: (saved.get(key), value) for key, value in known.items() if saved.get(key) != value}
    changed.pop("arguments", None)
    before, now = saved.get("arguments", saved), run.get("arguments", {})  # each of its own version of Transformers
    changed |= {key: (before[key], now[key]) for key in now if key in before and before[key] != now[key]}
    if changed:
        told = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
        raise ValueError(
            f"Cannot resume exactly from {path.parent}: {told}. Restore the old value, or load the weights with "
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
    for name in (TRAINER_STATE_FILE, DIGESTS_FILE):
        (folder / name).unlink(missing_ok=True)
    for leftover in [*folder.glob(".initial_states_*.tmp"), *folder.glob(f".{DIGESTS_FILE}.*.tmp")]:
        leftover.unlink()


def save_digests(checkpoint: str | os.PathLike[str]) -> None:
    """Write the SHA-256 of every file, of all processes, that resuming from a complete checkpoint reads."""
    folder = Path(checkpoint)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS_FILE]
    kept = [path for path in files if path.suffix not in EDITED or path.name == TRAINER_STATE_FILE]
    lines = [f"{file_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in kept]
    with replacing(folder / DIGESTS_FILE) as temporary:
        temporary.write_text("".join(lines))


def what_has_changed(checkpoint: str | os.PathLike[str]) -> str | None:
    """Which files of a checkpoint differ from what was written, in words, or None; reads all of them.

    Checkpoints of earlier versions have no digests: that is logged, and they count as unchanged.
    """
    folder = Path(checkpoint)
    path = folder / DIGESTS_FILE
    if not path.is_file():
        logger.warning(f"{folder} has no {DIGESTS_FILE}, so the content of its files is not checked.")
        return None
    digests = [line.partition("  ") for line in path.read_text(errors="replace").splitlines()]
    changed = [
        name for digest, _, name in digests if not (folder / name).is_file() or file_digest(folder / name) != digest
    ]
    return f"not as they were written: {', '.join(changed)}" if changed else None


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
        with safe_open(os.fspath(first), framework="pt") as file:
            processes = json.loads((file.metadata() or {}).get("run", "{}")).get("num_processes", 1)
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


def complete_checkpoints(output_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """The complete checkpoint folders (see `what_is_missing`), highest step first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [path for path in Path(output_dir).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True):
        if what_is_missing(folder) is None:
            yield folder


def newest_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The first of `complete_checkpoints`."""
    return next(complete_checkpoints(output_dir), None)


def checkpoint_to_resume(asked: str | os.PathLike[str] | Literal[True], output_dir: str | os.PathLike[str]) -> str:
    """The checkpoint folder `asked` for, or with True the newest one that is complete and unchanged.

    Raises:
        ValueError: if there is none, or if the one asked for is incomplete or changed.
    """
    if asked is not True:
        wrong = what_is_missing(asked) or what_has_changed(asked)
        if wrong:
            raise ValueError(
                f"Cannot resume from {asked}: {wrong}. "
                f"The newest complete checkpoint in {output_dir} is {newest_complete_checkpoint(output_dir)}."
            )
        return os.fspath(asked)
    for folder in complete_checkpoints(output_dir):
        changed = what_has_changed(folder)
        if changed is None:
            logger.info(f"Resuming from {folder}.")
            return os.fspath(folder)
        logger.warning(f"{folder} is skipped: its files are {changed}.")
    raise ValueError(f"There is no complete checkpoint in {output_dir}: train without resume_from_checkpoint.")


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
    loaded, found = load(checkpoint, config=copy.deepcopy(model.config), **loading)
    if found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"]:
        raise ValueError(f"The weights in {checkpoint} do not fit this {type(model).__name__}: {found}.")
    model.load_state_dict(loaded.state_dict())
    return True
