"""Checkpoints that a command makes of others: written as a whole, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.cli.inputs import load_tokenizer


def check_new(folder: Path) -> None:
    """Raise a `ValueError` for what is there already, unless it is an empty folder, and where none can be made."""
    try:
        place = folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder} leads nowhere ({error}): give another --output_dir.") from error
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{folder} is there already and not an empty folder: give another --output_dir.")
    nearest = next(parent for parent in (place, *place.parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{folder} would be in {nearest}, which is no folder: give another --output_dir.")


def tokenizer_to_copy(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint; None, and a line that says so, if it has none."""
    try:
        return load_tokenizer(model, trust_remote_code)
    except ValueError:
        print(f"{model} holds no tokenizer, so none is saved.")
        return None


def save_checkpoint(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Save into a temporary folder that becomes `folder`, new or empty, when all is written.

    An empty folder that is there stays, for it may be a mount point or the working directory, and gets the files,
    config.json last. Of a link, the folder that it leads to is meant.

    Args:
        model: Saved by its `save_pretrained`.
        tokenizer: Likewise; None for none.
        folder: Where the checkpoint will be.
        add_files: Writes further files into the folder that it is given.
    """
    folder = folder.resolve()
    there = folder.is_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = folder if there else folder.parent
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=parent))
    try:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if add_files is not None:
            add_files(temporary)
        if there:
            _move_files(temporary, folder)
        else:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o777 & ~umask)
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_files(source: Path, target: Path) -> None:
    """Move all that a folder holds into an empty one of the same file system, config.json last; back if one fails."""
    moved: list[str] = []
    try:
        for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, target / path.name)
            moved.append(path.name)
    except BaseException:
        for name in moved:
            os.replace(target / name, source / name)
        raise
