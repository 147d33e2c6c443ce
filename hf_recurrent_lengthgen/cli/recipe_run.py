"""Run the stages of a recipe in a folder, one after another, except those that are marked done.

The mark of a stage is a file in its folder that holds its command. To run a stage again, delete that folder.
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
"""Stages that write into the folder of another stage."""
UNMARKED = ("card", "push")
"""Stages that run every time: they detect by themselves that nothing has changed."""
PRODUCERS = ("convert", "expand", RESULT)
"""Stages whose results all later stages depend on."""


def run_stages(planned: Sequence[Stage], folder: Path, first: str | None = None, until: str | None = None) -> None:
    """Run the stages that are not done.

    Args:
        planned: All stages of a recipe, in order.
        folder: The folder of the run.
        first: First stage to run; the earlier ones were done in another way.
        until: Last stage to run.

    Raises:
        ValueError: for an unknown stage, for a stage that another command or other earlier results produced, and as
            the commands.
    """
    names = [stage.name for stage in planned]
    for name in filter(None, (first, until)):
        if name not in names:
            raise ValueError(f"There is no stage {name!r}: the stages are {', '.join(names)}.")
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
    """Whether a stage is done; a `ValueError` if by another command, or with another training file."""
    mark, command = _mark(folder, stage.name), _portable(stage, folder)
    if not mark.is_file():
        return False
    if (done := mark.read_text(encoding="utf-8")) != command:
        raise ValueError(
            f"Stage {stage.name} was done by another command ({done} instead of {command}): restore its options, "
            f"give another --output, or delete {mark.parent} and the folders of the stages after it."
        )
    return True


def _refuse_outdated(names: Sequence[str], folder: Path, begin: int, end: int) -> None:
    """Raise a `ValueError` if a stage would run again after later ones have used its results."""
    for index in range(begin, end + 1):
        if names[index] in PRODUCERS and not _mark(folder, names[index]).is_file():
            outdated = [_mark(folder, name).parent for name in names[index + 1 :] if _is_begun(folder, name)]
            if outdated:
                raise ValueError(
                    f"Stage {names[index]} would run again, but later stages have used its previous results: delete "
                    f"{', '.join(dict.fromkeys(map(str, outdated)))} as well."
                )


def _is_begun(folder: Path, name: str) -> bool:
    begun = name == RESULT and newest_complete_checkpoint(str(folder / RESULT)) is not None
    return begun or _mark(folder, name).is_file()


def _portable(stage: Stage, folder: Path) -> str:
    """The command, independent of the folders of the run and of the recipes."""
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
