"""Commands that run in several processes, each of which reads a piece of the texts."""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hf_recurrent_lengthgen.cli.parsing import CommandParser, positive
from hf_recurrent_lengthgen.evaluation.readers import reading_together


def add_context_parallel(parser: CommandParser) -> None:
    parser.run.add_argument(
        "--context-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="processes that read each text together, one on each GPU; their results are not cached (default: 1)",
    )


def started(options: argparse.Namespace, command: str, arguments: Sequence[str]) -> int | None:
    """Run the command in `--context-parallel` processes; its exit status, or None in one of them and for one."""
    if options.context_parallel == 1 or "WORLD_SIZE" in os.environ:
        return None
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(options.context_parallel), "-m", "hf_recurrent_lengthgen.cli.main"]
    return subprocess.run([*launcher, command, *arguments], check=False).returncode


@contextlib.contextmanager
def together(options: argparse.Namespace) -> Iterator[bool]:
    """Within the `with` block, all processes read together; whether this is the first one, which alone prints.

    Raises:
        ValueError: if other processes were started than `--context-parallel` says.
    """
    if options.context_parallel == 1:
        yield True
        return
    if (count := int(os.environ["WORLD_SIZE"])) != options.context_parallel:
        raise ValueError(f"--context-parallel is {options.context_parallel}, but {count} processes were started.")
    options.no_cache = True
    is_cuda = torch.device(options.device).type == "cuda"
    if is_cuda:
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(options.device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        first = dist.get_rank() == 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_together(dist.group.WORLD))
            if not first:
                silent = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(silent))
            yield first
    finally:
        dist.destroy_process_group()


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
