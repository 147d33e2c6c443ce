"""The stages of a recipe: one command of `lengthgen` each, in its own folder of a run."""

import contextlib
import importlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.recipes.catalogue import Options, Recipe, rows_per_process

COMMANDS = {
    "convert": "convert",
    "check": "verify",
    "expand": "expand",
    "train": "train",
    "verify": "verify",
    "evaluate": "evaluate",
    "diagnose": "diagnose",
    "retrieve": "retrieve",
    "card": "card",
    "push": "push",
}
"""What each stage runs, in the order of the stages."""

MEASURES = {"evaluate": "result.json", "diagnose": "result.json", "retrieve": "retrieval.json"}
"""The result file of each command that measures."""

RESULT = "train"
"""The stage whose folder is the checkpoint that a recipe is for."""

_WITHOUT_TEXT = ("passkey",)


def command_of(stage: str) -> ModuleType:
    """The module of a stage's command."""
    return importlib.import_module(f"hf_recurrent_lengthgen.cli.{COMMANDS[stage]}")


@dataclass(frozen=True)
class Choices:
    """What a person chooses for a run.

    Args:
        source: In place of the recipe's: folder, file or name on the Hub.
        tokenizer: Likewise.
        data: Text in place of the training file's.
        device: "cpu", "cuda", ...
        processes: Of the training.
        push: owner/name on the Hub; None to push nothing.
        dry_run: Only say what would be pushed.
        trust_remote_code: Whether code of the source may run.
        cache: Folder for kept results; None for the usual one.
        options: Further options by stage, which win over the recipe's.
    """

    source: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    device: str = "cpu"
    processes: int = 1
    push: str | None = None
    dry_run: bool = False
    trust_remote_code: bool = False
    cache: str | None = None
    options: Mapping[str, Options] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: A key of `COMMANDS`.
        command: Arguments of `lengthgen` that its result depends on.
        hardware: Further ones, which say where it runs.
        needs: Stages whose results it reads.
        rows: Of an optimizer step, over all processes; 0 for other stages than the training.
    """

    name: str
    command: tuple[str, ...]
    hardware: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    rows: int = 0

    @property
    def line(self) -> str:
        """The shell command."""
        return shlex.join(["lengthgen", *self.command, *self.hardware])


def stages(recipe: Recipe, folder: Path, choices: Choices) -> list[Stage]:
    """All stages of a recipe, in their order.

    Raises:
        ValueError: for options of stages that there are not, options that are missing, and code that may not run.
    """
    for name, why in recipe.train.missing.items():
        if name not in choices.options.get("train", {}):
            raise ValueError(f"{recipe.name} needs train.{name}, for {why}: give --set train.{name}=VALUE.")
    if recipe.source.remote_code and choices.source is None and not choices.trust_remote_code:
        raise ValueError(
            f"The tokenizer of {recipe.source.model} is Python code in its repository: read it, and give "
            "--trust_remote_code."
        )
    source, model = recipe.source, choices.source or recipe.source.model
    converted, trained = str(folder / "convert"), str(folder / RESULT)
    remote = ("--trust-remote-code",) if choices.trust_remote_code else ()

    def flags(name: str, usual: Mapping[str, Any], between: str = "-") -> list[str]:
        return _flags({**usual, **choices.options.get(name, {})}, between)

    convert = {
        **({} if choices.source is not None or Path(model).exists() else {"revision": source.revision}),
        "tokenizer": choices.tokenizer or (source.tokenizer if choices.source is None else None) or "false",
        "training_length": str(source.training_length),
    }
    planned = [Stage("convert", ("convert", model, "--output_dir", converted, *flags("convert", convert, "_")))]
    planned.append(Stage("check", ("verify", model, converted, *flags("check", {})), remote, ("convert",)))
    if recipe.expand is not None:
        command = ("expand", converted, "--output_dir", str(folder / "expand"), *flags("expand", recipe.expand, "_"))
        planned.append(Stage("expand", command, remote, ("convert",)))
    planned.append(_train(recipe, folder, choices, remote))
    planned.append(Stage("verify", ("verify", trained, *flags("verify", {})), remote, (RESULT,)))
    measured = [name for name in MEASURES if name in recipe.measure]
    planned += [_measure(name, recipe, folder, choices, remote) for name in measured]
    results = [str(folder / name / MEASURES[name]) for name in measured]
    card = ("card", trained, "--results", *results, *flags("card", {"repo": choices.push or "false"}))
    planned.append(Stage("card", card, (), (RESULT, "verify", *measured)))
    if choices.push is not None:
        trial = ("--dry-run",) if choices.dry_run else ()
        push = ("push", trained, choices.push, *flags("push", {}))
        planned.append(Stage("push", push, trial, (RESULT, "verify", "card")))
    names = [stage.name for stage in planned]
    if unknown := sorted(set(choices.options) - set(names)):
        raise ValueError(f"{recipe.name} has no stage {', '.join(unknown)}: its stages are {', '.join(names)}.")
    return planned


def _train(recipe: Recipe, folder: Path, choices: Choices, remote: tuple[str, ...]) -> Stage:
    before = "convert" if recipe.expand is None else "expand"
    given = choices.options.get("train", {})
    options = {
        "model": str(folder / before),
        "output_dir": str(folder / RESULT),
        **({"data": choices.data} if choices.data and recipe.data else {}),
        **recipe.train.options,
        **_divided(recipe, choices.processes, given),
        **given,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    hardware = (*(["--use_cpu"] if choices.device == "cpu" else []), *remote)
    rows = choices.processes * rows_per_process({**recipe.training, **options})
    return Stage("train", ("train", str(recipe.training_file), *flags), hardware, (before,), rows)


def _divided(recipe: Recipe, processes: int, given: Options) -> Options:
    """The accumulation steps of each of several processes, unless a person gives them."""
    steps = int(recipe.training["gradient_accumulation_steps"])
    if processes == 1 or "gradient_accumulation_steps" in given:
        return {}
    if steps % processes:
        raise ValueError(
            f"The recipe accumulates {steps} times {recipe.training['per_device_train_batch_size']} rows, which "
            f"{processes} processes cannot share: choose --set train.per_device_train_batch_size=ROWS and --set "
            f"train.gradient_accumulation_steps=N, of which {processes} processes make {recipe.rows} rows."
        )
    return {"gradient_accumulation_steps": str(steps // processes)}


def _measure(name: str, recipe: Recipe, folder: Path, choices: Choices, remote: tuple[str, ...]) -> Stage:
    measure: Mapping[str, Options] = recipe.measure  # type: ignore[assignment]
    options = {**measure[name], **choices.options.get(name, {})}
    data = None if recipe.data is None else choices.data or str(recipe.training["data"])
    if data is not None and not (name == "retrieve" and options.get("task", "passkey") in _WITHOUT_TEXT):
        options = {"data": data, **options}
    if name != "retrieve":
        options = {"roles": "base,cured", **options}
    models = (str(folder / "convert"), str(folder / RESULT))
    command = (name, *models, "--output", str(folder / name), *_flags(options, "-"))
    cache = () if choices.cache is None else ("--cache", choices.cache)
    device = () if "device" in options else ("--device", choices.device)
    return Stage(name, command, (*device, *cache, *remote), ("convert", RESULT))


def check_commands(planned: Sequence[Stage]) -> None:
    """Parse all commands now, so that a typo does not end a run after hours.

    Raises:
        ValueError: with what is wrong.
    """
    for stage in planned:
        said = io.StringIO()
        arguments = [*stage.command[1:], *stage.hardware]
        try:
            with contextlib.redirect_stderr(said):
                if stage.name == "train":
                    read_options(arguments[1:], arguments[0])
                else:
                    command_of(stage.name)._parser().parse_args(arguments)
        except SystemExit as error:
            wrong = said.getvalue().strip().splitlines()[-1:] or [str(error)]
            raise ValueError(f"Stage {stage.name}: {wrong[0]}") from error


def check_text(recipe: Recipe, choices: Choices) -> None:
    """Raise a `ValueError` if the text of the recipe is neither given nor where its file says."""
    if recipe.data is None or choices.data is not None or "data" in choices.options.get("train", {}):
        return
    usual = recipe.training["data"]
    if not Path(usual).exists():
        raise ValueError(f"{usual} is not here: give --data, with {recipe.data.name} ({recipe.data.where}).")


def _flags(options: Mapping[str, Any], between: str) -> list[str]:
    """Options as flags; of "true" the name alone, of "false" nothing."""
    flags = []
    for name, value in options.items():
        if value != "false":
            flag = f"--{name.replace('_', between).replace('-', between)}"
            flags += [flag] if value == "true" else [flag, str(value)]
    return flags
