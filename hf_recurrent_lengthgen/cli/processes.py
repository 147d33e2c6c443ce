"""Process groups of commands."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def ending_processes() -> Iterator[None]:
    """End the process group that the block has made: threads of one that outlives the interpreter abort the process.

    With NCCL not after an error, because a process would wait for the others, which wait for it.
    """
    kept = dist.is_initialized()
    try:
        yield
    except Exception:
        kept = kept or (dist.is_initialized() and dist.get_backend() != "gloo")
        raise
    finally:
        if dist.is_initialized() and not kept:
            dist.destroy_process_group()
