"""Folders that a command makes: written as a whole, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new(folder: Path) -> None:
    """Raise a `ValueError` for what is there already, unless it is an empty folder, and where none can be made."""
    try:
        place = folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder} leads nowhere ({error}): give another --output.") from error
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{folder} is there already and not an empty folder: give another --output.")
    nearest = next(parent for parent in (place, *place.parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{folder} would be in {nearest}, which is no folder: give another --output.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder`, new or empty, when the block ends without an error.

    An empty folder that is there stays, for it may be a mount point or the working directory, and gets the files,
    config.json last. Of a link, the folder that it leads to is meant. An error removes what was written.
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
