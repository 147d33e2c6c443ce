"""`Trainer` lets two runs write into one folder; here one of them is refused.

The folder itself is locked (flock), so no file is left behind, and the lock ends with its process in every case.
Network file systems keep such a lock at least between the processes of one machine; where a folder cannot be locked, a
warning says so.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

_held: set[int] = set()


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[bool]:
    """Lock a folder, made if missing, until the block ends. Yields False, without a lock, if another run holds it."""
    os.makedirs(folder, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        descriptor = None
    try:
        if descriptor is not None and fcntl is not None:
            _held.add(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                logger.warning(f"{folder} cannot be locked ({error}): make sure that no other run writes to it.")
        yield True
    finally:
        if descriptor is not None:
            _held.discard(descriptor)
            os.close(descriptor)


def _let_go() -> None:
    """Release the lock in a forked process, such as a data worker, which may outlive this one."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
