"""Output folders of commands, written completely or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new(folder: Path) -> None:
    """Raise a `ValueError` unless `folder` is an empty folder, or does not exist and can be made."""
    try:
        place = folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder} leads nowhere ({error}): give another --output.") from error
    if place.is_symlink():  # a loop, from Python 3.13 on
        raise ValueError(f"{folder} leads nowhere: give another --output.")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{folder} exists already and is not an empty folder: give another --output.")
    nearest = next(parent for parent in (place, *place.parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{folder} would be inside {nearest}, which is no folder: give another --output.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder`, new or empty, when the block ends without an error.

    An existing empty folder is kept, because it may be a mount point or the working directory, and gets the files,
    config.json last. A link stands for the folder that it leads to. After an error nothing written is left.
    """
    folder = folder.resolve()
    there = folder.is_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = folder if there else folder.parent
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=parent))
    try:
        yield temporary
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
    """Move the files of a folder into an empty one of the same file system, config.json last; back if one fails."""
    moved: list[str] = []
    try:
        for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, target / path.name)
            moved.append(path.name)
    except BaseException:
        for name in moved:
            os.replace(target / name, source / name)
        raise
