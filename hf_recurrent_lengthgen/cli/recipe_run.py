"""Runs the stages of a recipe in a folder, one after another, and skips those that are marked done.

A stage's mark is a file in the folder of its results that holds its command. To do a stage again, delete that folder;
what was made of its results is never mixed with new ones.
"""

import gc
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hf_recurrent_lengthgen.cli.recipe_stages import RESULT, Stage, command_of
from hf_recurrent_lengthgen.records import read_lineage
from hf_recurrent_lengthgen.trainers.checkpoints import newest_complete_checkpoint

PLACES = {"check": "convert", "verify": RESULT, "card": RESULT, "push": RESULT}
"""Stages that add to the folder of another one."""
NEW_FOLDER = ("convert", "expand")
"""Stages whose command writes all or nothing, into a new folder."""
UNMARKED = ("card", "push")
"""Stages that are done each time, for they find by themselves that nothing has changed."""


def run_stages(
    planned: Sequence[Stage],
    folder: Path,
    *,
    first: str | None = None,
    until: str | None = None,
    launch: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Do what is left to do.

    Args:
        planned: All stages of a recipe, in their order.
        folder: Of the run.
        first: First stage to do; those before it were done otherwise.
        until: Last stage to do.
        launch: Command that starts the training on several processes: "accelerate launch --num_processes 8".
        say: Gets what a person should see.

    Raises:
        ValueError: for an unknown stage, stages that were done by another command or from results that are gone, and
            as the commands raise.
    """
    names = [stage.name for stage in planned]
    for name in filter(None, (first, until)):
        if name not in names:
            raise ValueError(f"There is no stage {name!r} here: the stages are {', '.join(names)}.")
    begin, end = names.index(first or names[0]), names.index(until or names[-1])
    for stage in planned[begin : end + 1]:
        mark, command = _mark(stage, folder), _portable(stage, folder)
        if mark.is_file():
            if (done := mark.read_text(encoding="utf-8")) != command:
                raise ValueError(
                    f"Stage {stage.name} was done by another command ({done} instead of {command}): set its options "
                    f"back, give another --output_dir, or delete {mark.parent} to do it again."
                )
            say(f"{stage.name}: done before")
            continue
        if built := [other for other in planned if stage.name in other.needs and _mark(other, folder).is_file()]:
            raise ValueError(
                f"Stage {built[0].name} was done from earlier results of {stage.name}, which is to be done again: "
                f"delete {_mark(built[0], folder).parent} as well."
            )
        if stage.name in NEW_FOLDER and mark.parent.exists():
            raise ValueError(f"{mark.parent} is there, but not marked done: delete it, and go on.")
        say(f"\n{stage.name}: {stage.line}")
        start = time.monotonic()
        _do(stage, mark.parent, launch)
        if stage.name not in UNMARKED:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(command, encoding="utf-8")
        say(f"{stage.name}: done in {_duration(time.monotonic() - start)}")


def _mark(stage: Stage, folder: Path) -> Path:
    return folder / PLACES.get(stage.name, stage.name) / f".{stage.name}.done"


def _portable(stage: Stage, folder: Path) -> str:
    """The command, wherever the run and the recipes are."""
    command = [part.replace(f"{folder}{os.sep}", "./") for part in stage.command]
    if stage.name == RESULT:
        command[1] = Path(command[1]).name
    return shlex.join(["lengthgen", *command])


def _do(stage: Stage, place: Path, launch: str | None) -> None:
    arguments = [*stage.command[1:], *stage.hardware]
    if stage.name == RESULT and newest_complete_checkpoint(str(place)) is not None:
        arguments.append("--resume")
    if launch is not None and stage.name == RESULT:
        program = [*shlex.split(launch), "-m", "hf_recurrent_lengthgen.cli.main", stage.command[0], *arguments]
        status = _run_process(program)
    else:
        status = command_of(stage.name).run(arguments)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise ValueError(f"Stage {stage.name} failed (exit status {status}): see above.")
    lineage = read_lineage(place) if stage.rows else None
    training = lineage.steps[-1].training if lineage is not None else None
    if training is not None and training.rows_per_step != stage.rows:
        raise ValueError(
            f"The training had {training.rows_per_step:,} rows in a step instead of {stage.rows:,}: give --processes, "
            f"the number of processes that --launch starts, and delete {place}."
        )


def _run_process(program: Sequence[str]) -> int:
    """Exit status of a program; on an interrupt, which it gets as well, it may end first."""
    try:
        process = subprocess.Popen(program)
    except OSError as error:
        raise ValueError(f"--launch cannot start {program[0]}: {error}") from error
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            if process.wait() == 0:
                return 130
            raise


def _duration(seconds: float) -> str:
    """ "9 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
