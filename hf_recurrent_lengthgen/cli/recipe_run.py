"""Runs the stages of a recipe in a folder, and keeps what is done: recipe_run.json.

A stage is done when its command has ended well, and stays done as long as its command, the settings that this reads,
the results that it builds on, and its own files are the same. Nothing that is done is written over: changed settings
are refused, unless a person wants the stage done again, and then the old results are moved to earlier/.
"""

import gc
import hashlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from hf_recurrent_lengthgen.cli.recipe_stages import RESULT, Stage, command_of
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.records import read_lineage, verified_files
from hf_recurrent_lengthgen.trainers.checkpoints import newest_complete_checkpoint

RUN_FILE, EARLIER = "recipe_run.json", "earlier"
CHECKPOINTS = ("convert", "expand", RESULT)
"""Stages that write one."""
NEW_FOLDER = ("convert", "expand")
"""Stages whose command writes all or nothing, into a new folder."""
IN_CHECKPOINT = {
    "check": ("convert", ("verification.json",)),
    "verify": (RESULT, ("verification.json",)),
    "card": (RESULT, ("README.md", "figures/*", "results/*")),
    "push": (RESULT, ()),
}
"""Stages that add files to a checkpoint, which, and which files: they are done again whenever something changes."""


@dataclass(frozen=True)
class StageRecord:
    """What is known of a stage that was started.

    Args:
        state: Whether it ended well.
        command: Shell command, with the folder of the run as ".".
        settings: What the file in the command held, by name.
        inputs: What it builds on: `content` of the stages that it needs, by name.
        seconds: Wall-clock time of all its runs so far.
        files: Bytes of its files by path in its folder.
        content: SHA-256 of what later stages build on: weights, config and code of checkpoints, else names and sizes.
    """

    state: Literal["started", "done"]
    command: str
    settings: dict[str, str]
    inputs: dict[str, str]
    seconds: float = 0.0
    files: dict[str, int] | None = None
    content: str = ""


@document("recipe_run")
@dataclass(frozen=True)
class RecipeRun:
    """The stages of a recipe that were started, by name."""

    recipe: str
    stages: dict[str, StageRecord]


def run_stages(
    recipe: str,
    planned: Sequence[Stage],
    folder: Path,
    *,
    until: str | None = None,
    only: Sequence[str] | None = None,
    redo: str | None = None,
    launch: str | None = None,
    say: Callable[[str], None] = print,
) -> RecipeRun:
    """Do what is left to do.

    Args:
        recipe: Its name.
        planned: All its stages, in their order.
        folder: Of the run.
        until: Last stage to do.
        only: Stages to do, if not all.
        redo: Stage to do again, with all that build on it.
        launch: Command that starts the training on several processes: "accelerate launch --num_processes 8".
        say: Gets what a person should see.

    Raises:
        ValueError: for a folder of another recipe, unknown stages, stages whose needs are not done, stages that are
            done with other settings, and as the commands raise.
    """
    names = [stage.name for stage in planned]
    for name in (*(only or ()), *filter(None, (until, redo))):
        if name not in names:
            raise ValueError(f"{recipe} has no stage {name!r} here: its stages are {', '.join(names)}.")
    folder.mkdir(parents=True, exist_ok=True)
    run = _read_run(recipe, folder)
    if redo is not None:
        run = _move_aside(run, planned, redo, folder, say)
    wanted = [name for name in names[: None if until is None else names.index(until) + 1] if name in (only or names)]
    for stage in planned:
        if stage.name in wanted:
            run = _bring_up(stage, run, folder, launch, say)
    return run


def _bring_up(stage: Stage, run: RecipeRun, folder: Path, launch: str | None, say: Callable[[str], None]) -> RecipeRun:
    """The run with the stage done."""
    lacking = [name for name in stage.needs if (found := run.stages.get(name)) is None or found.state != "done"]
    if lacking:
        raise ValueError(f"Stage {stage.name} needs {', '.join(lacking)}, which is not done: let the run do it first.")
    wanted = StageRecord(
        "started",
        _portable(stage, folder),
        dict(stage.settings),
        {name: run.stages[name].content for name in stage.needs},
    )
    known, place = run.stages.get(stage.name), folder / _place(stage.name)
    if known is not None:
        changed = _changes(known, wanted)
        if changed and stage.name not in IN_CHECKPOINT:
            raise ValueError(
                f"Stage {stage.name} was {'done' if known.state == 'done' else 'begun'} with other settings: "
                f"{'; '.join(changed)}. Set them back, give another --output_dir, or --redo {stage.name}, which keeps "
                f"the old results in {EARLIER}/."
            )
        wanted = replace(wanted, seconds=known.seconds)
        if known.state == "done":
            changed += [f"{name} is not as it was" for name in _changed_files(place, known)]
            if not changed:
                say(f"{stage.name}: done before, in {_duration(known.seconds)}")
                return run
            say(f"{stage.name}: done again, as {'; '.join(changed[:3])}")
        if stage.name in NEW_FOLDER:  # also of a run that was killed before it noted that this one is done
            _keep(place, folder, say)
    run = _recorded(run, stage.name, wanted, folder)
    say(f"\n{stage.name}: {stage.line}")
    begin = time.monotonic()
    try:
        _do(stage, place, launch)
    except BaseException:
        _recorded(run, stage.name, replace(wanted, seconds=wanted.seconds + time.monotonic() - begin), folder)
        raise
    wanted = replace(wanted, seconds=wanted.seconds + time.monotonic() - begin)
    _check_rows(stage, place)
    if not stage.trial:
        files, content = _results(place, stage.name)
        wanted = replace(wanted, state="done", files=files, content=content)
        say(f"{stage.name}: done in {_duration(wanted.seconds)}")
    return _recorded(run, stage.name, wanted, folder)


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


def _check_rows(stage: Stage, place: Path) -> None:
    """Raise a `ValueError` if a training had other rows per step than the run was told, so other processes."""
    lineage = read_lineage(place) if stage.rows else None
    training = lineage.steps[-1].training if lineage is not None else None
    if training is not None and training.rows_per_step != stage.rows:
        raise ValueError(
            f"The training had {training.rows_per_step:,} rows in a step instead of {stage.rows:,}: give --processes, "
            "the number of processes that --launch starts, and --redo train."
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


def _changes(known: StageRecord, wanted: StageRecord) -> list[str]:
    """How what a stage depends on differs from what it was begun with, in words."""
    differ = [
        f"{key} was {known.settings.get(key)} and is {wanted.settings.get(key)}"
        for key in sorted(known.settings.keys() | wanted.settings.keys())
        if known.settings.get(key) != wanted.settings.get(key)
    ]
    if known.command != wanted.command:
        old, new = shlex.split(known.command), shlex.split(wanted.command)
        gone, come = [part for part in old if part not in new], [part for part in new if part not in old]
        differ.append(f"its command had {' '.join(gone) or 'nothing'} where it has {' '.join(come) or 'nothing'} now")
    return differ + [
        f"{need} has other results now" for need in wanted.inputs if known.inputs.get(need) != wanted.inputs[need]
    ]


def _move_aside(
    run: RecipeRun, planned: Sequence[Stage], name: str, folder: Path, say: Callable[[str], None]
) -> RecipeRun:
    """The run without a stage and all that build on it, whose folders are kept."""
    again = [name]
    for stage in planned:
        if stage.name not in again and any(need in again for need in stage.needs):
            again.append(stage.name)
    run = replace(run, stages={old: record for old, record in run.stages.items() if old not in again})
    for old in again:
        if old not in IN_CHECKPOINT:
            _keep(folder / old, folder, say)
    write_result(folder / RUN_FILE, run)
    return run


def _keep(place: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Move what is there to earlier/, under a name that is free."""
    if not place.exists():
        return
    number = 1
    while (target := folder / EARLIER / f"{place.name}-{number}").exists():
        number += 1
    target.parent.mkdir(exist_ok=True)
    os.replace(place, target)
    say(f"Moved {place} to {target}")


def _place(name: str) -> str:
    """Folder of a stage's results."""
    return IN_CHECKPOINT[name][0] if name in IN_CHECKPOINT else name


def _results(place: Path, name: str) -> tuple[dict[str, int], str]:
    """Bytes of a stage's files by path, and a digest of what later stages build on."""
    if name in CHECKPOINTS:
        told: dict[str, str] | dict[str, int] = verified_files(place)
        files = {file: (place / file).stat().st_size for file in told}
    else:
        patterns = IN_CHECKPOINT[name][1] if name in IN_CHECKPOINT else ("**/*",)
        paths = sorted(path for pattern in patterns for path in place.glob(pattern) if path.is_file())
        told = files = {path.relative_to(place).as_posix(): path.stat().st_size for path in paths}
    return files, hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _changed_files(place: Path, known: StageRecord) -> list[str]:
    """Files of a stage that are not there as they were."""
    return [
        name
        for name, size in (known.files or {}).items()
        if not (path := place / name).is_file() or path.stat().st_size != size
    ]


def _portable(stage: Stage, folder: Path) -> str:
    """The command, wherever the run and the recipes are."""
    command = [part.replace(f"{folder}{os.sep}", "./") for part in stage.command]
    if stage.settings:
        command[1] = Path(command[1]).name
    return shlex.join(["lengthgen", *command])


def _recorded(run: RecipeRun, name: str, record: StageRecord, folder: Path) -> RecipeRun:
    run = replace(run, stages={**run.stages, name: record})
    write_result(folder / RUN_FILE, run)
    return run


def _read_run(recipe: str, folder: Path) -> RecipeRun:
    if not (folder / RUN_FILE).is_file():
        if any(folder.iterdir()):
            raise ValueError(f"{folder} holds something else than a run of a recipe: give another --output_dir.")
        return RecipeRun(recipe, {})
    run = read_result(folder / RUN_FILE, RecipeRun)
    if run.recipe != recipe:
        raise ValueError(f"{folder} holds a run of {run.recipe}, not of {recipe}: give another --output_dir.")
    return run


def _duration(seconds: float) -> str:
    """ "9 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
