"""Runs the stages of a recipe in a folder, one after another, and skips those that are marked done.

A stage's mark is a file in the folder of its results that holds its command. To do a stage again, delete that folder.
"""

import gc
import hashlib
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_recurrent_lengthgen.cli.recipe_stages import RESULT, Stage
from hf_recurrent_lengthgen.trainers.checkpoints import newest_complete_checkpoint

PLACES = {"check": "convert", "verify": RESULT, "card": RESULT, "push": RESULT}
"""Stages that add to the folder of another one."""
UNMARKED = ("card", "push")
"""Stages that are done each time, for they find by themselves that nothing has changed."""
PRODUCERS = ("convert", "expand", RESULT)
"""Stages whose results all stages behind them are made of."""


def run_stages(planned: Sequence[Stage], folder: Path, first: str | None = None, until: str | None = None) -> None:
    """Do what is left to do.

    Args:
        planned: All stages of a recipe, in their order.
        folder: Of the run.
        first: First stage to do; those before it were done otherwise.
        until: Last stage to do.

    Raises:
        ValueError: for an unknown stage, stages that were done by another command or from other results of an earlier
            stage, and as the commands raise.
    """
    names = [stage.name for stage in planned]
    for name in filter(None, (first, until)):
        if name not in names:
            raise ValueError(f"There is no stage {name!r} here: the stages are {', '.join(names)}.")
    begin, end = names.index(first or names[0]), names.index(until or names[-1])
    for stage in planned[:begin]:
        _is_done(stage, folder)
    _refuse_outdated(names, folder, begin, end)
    for stage in planned[begin : end + 1]:
        place = folder / PLACES.get(stage.name, stage.name)
        if _is_done(stage, folder):
            print(f"{stage.name}: done before", flush=True)
            continue
        print(f"\n{stage.name}: {stage.line}", flush=True)
        start = time.monotonic()
        _do(stage, place)
        if stage.name not in UNMARKED:
            _mark(folder, stage.name).write_text(_portable(stage, folder), encoding="utf-8")
        print(f"{stage.name}: done in {time.monotonic() - start:.0f} s", flush=True)


def _mark(folder: Path, name: str) -> Path:
    return folder / PLACES.get(name, name) / f".{name}.done"


def _is_done(stage: Stage, folder: Path) -> bool:
    """Whether a stage was done; a `ValueError` if it was by another command, or a training with another file."""
    mark, command = _mark(folder, stage.name), _portable(stage, folder)
    if not mark.is_file():
        return False
    if (done := mark.read_text(encoding="utf-8")) != command:
        raise ValueError(
            f"Stage {stage.name} was done by another command ({done} instead of {command}): set its options back, "
            f"give another --output, or delete {mark.parent} and the folders of the stages after it."
        )
    return True


def _refuse_outdated(names: Sequence[str], folder: Path, begin: int, end: int) -> None:
    """Refuse to do a stage anew while a later one is done from its earlier results."""
    for index in range(begin, end + 1):
        if names[index] in PRODUCERS and not _mark(folder, names[index]).is_file():
            outdated = [_mark(folder, name).parent for name in names[index + 1 :] if _is_begun(folder, name)]
            if outdated:
                raise ValueError(
                    f"Stage {names[index]} is to be done, but later ones are done from its results of before: delete "
                    f"{', '.join(dict.fromkeys(map(str, outdated)))} as well."
                )


def _is_begun(folder: Path, name: str) -> bool:
    begun = name == RESULT and newest_complete_checkpoint(str(folder / RESULT)) is not None
    return begun or _mark(folder, name).is_file()


def _portable(stage: Stage, folder: Path) -> str:
    """The command, wherever the run and the recipes are."""
    command = [part.replace(f"{folder}{os.sep}", "./") for part in stage.command]
    if stage.name == RESULT:
        settings = Path(command[1]).read_bytes()
        command[1] = f"{Path(command[1]).name}#{hashlib.sha256(settings).hexdigest()[:12]}"
    return shlex.join(["lengthgen", *command])


def _do(stage: Stage, place: Path) -> None:
    arguments = [*stage.command[1:], *stage.hardware]
    if stage.name == RESULT and newest_complete_checkpoint(str(place)) is not None:
        arguments.append("--resume")
    status = stage.module.run(arguments)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise ValueError(f"Stage {stage.name} failed (exit status {status}): see above.")
