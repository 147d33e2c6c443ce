"""Output folders of commands, written completely or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.checkpoints.records import Lineage, record_step


def check_new(folder: Path) -> None:
    """Raise a `ValueError` unless `folder` is an empty folder, or does not exist and can be made."""
    place = folder.resolve()
    nearest = next(parent for parent in (place, *place.parents) if parent.exists())
    if not nearest.is_dir() or (nearest == place and any(place.iterdir())):
        raise ValueError(f"{folder}: {nearest} exists already and is not an empty folder. Give another --output.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder`, new or empty, when the block ends without an error.

    An existing empty folder stays, and a link stands for the folder that it leads to. After an error in the block
    nothing written is left.
    """
    folder = folder.resolve()
    exists = folder.is_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = folder if exists else folder.parent
    hidden = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=parent))
    temporary = hidden / "new"  # with the permissions of the user's umask
    temporary.mkdir()
    try:
        yield temporary
        if exists:  # it may be a mount point or the working directory
            for path in temporary.iterdir():
                os.replace(path, folder / path.name)
        else:
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def save_checkpoint(
    model: Any,
    folder: Path,
    source: str,
    trust_remote_code: bool,
    start: Lineage,
    kind: Literal["expand", "forget", "merge"],
    what: str,
    command: Sequence[str],
) -> None:
    """Save a model that was made from `source`, with the tokenizer of that, if it has one, and its lineage.

    The last four arguments are those of `record_step`.
    """
    try:
        tokenizer = load_tokenizer(source, trust_remote_code)
    except ValueError:
        tokenizer = None
        print(f"{source} holds no tokenizer, so none is saved.")
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        record_step(temporary, start, kind, what, command)
