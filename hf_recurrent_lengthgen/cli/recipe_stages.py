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

from hf_recurrent_lengthgen.cli.options import RunParser
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
        settings: What the file holds that is the first argument.
        trial: Whether it only says what it would do.
        rows: Of an optimizer step, over all processes; 0 for other stages than the training.
    """

    name: str
    command: tuple[str, ...]
    hardware: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    trial: bool = False
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
    allowed = stage_names(recipe, choices)
    if unknown := sorted(set(choices.options) - set(allowed)):
        raise ValueError(f"{recipe.name} has no stage {', '.join(unknown)}: its stages are {', '.join(allowed)}.")
    lacking = {name: why for name, why in recipe.train.missing.items() if name not in choices.options.get("train", {})}
    for name, why in lacking.items():
        raise ValueError(f"{recipe.name} needs train.{name}, for {why}: give --set train.{name}=VALUE.")
    if recipe.source.remote_code and choices.source is None and not choices.trust_remote_code:
        raise ValueError(
            f"The tokenizer of {recipe.source.model} is Python code in its repository: read it, and give "
            "--trust_remote_code."
        )
    build = {
        "convert": _convert,
        "check": _check,
        "expand": _expand,
        "train": _train,
        "verify": _verify,
        "card": _card,
        "push": _push,
    }
    return [
        build[name](recipe, folder, choices) if name in build else _measure(name, recipe, folder, choices)
        for name in allowed
    ]


def stage_names(recipe: Recipe, choices: Choices) -> list[str]:
    """Names of the stages that a run has."""
    left_out = {
        *(("expand",) if recipe.expand is None else ()),
        *(MEASURES.keys() - recipe.measure.keys()),
        *(("push",) if choices.push is None else ()),
    }
    return [name for name in COMMANDS if name not in left_out]


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
                    RunParser().read(arguments[1:], arguments[0])
                else:
                    command_of(stage.name)._parser().parse_args(arguments)
        except SystemExit as error:
            wrong = said.getvalue().strip().splitlines()[-1:] or [str(error)]
            raise ValueError(f"Stage {stage.name}: {wrong[0]}") from error


def _convert(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
    source, model = recipe.source, choices.source or recipe.source.model
    here = Path(model)
    revision = {} if choices.source is not None or here.exists() else {"revision": source.revision}
    tokenizer = choices.tokenizer or (source.tokenizer if choices.source is None else None)
    options = {
        **revision,
        **({"tokenizer": tokenizer} if tokenizer else {}),
        "training_length": str(source.training_length),
        **choices.options.get("convert", {}),
    }
    command = ("convert", model, "--output_dir", str(folder / "convert"), *_flags(options, "_"))
    return Stage("convert", command, settings=_contents(here))


def _contents(source: Path) -> tuple[tuple[str, str], ...]:
    """Size and time of the files of a source that is here, so that others in their place are noticed."""
    files = sorted(source.iterdir()) if source.is_dir() else [source] if source.is_file() else []
    found = ((path.name, path.stat()) for path in files if path.is_file())
    return tuple((name, f"{stat.st_size} bytes of {stat.st_mtime:.0f}") for name, stat in found)


def check_text(recipe: Recipe, choices: Choices) -> None:
    """Raise a `ValueError` if the text of the recipe is neither given nor where its file says."""
    if recipe.data is None or choices.data is not None or "data" in choices.options.get("train", {}):
        return
    usual = recipe.training["data"]
    if not Path(usual).exists():
        raise ValueError(f"{usual} is not here: give --data, with {recipe.data.name} ({recipe.data.where}).")


def _check(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
    model, options = choices.source or recipe.source.model, choices.options.get("check", {})
    command = ("verify", model, str(folder / "convert"), *_flags(options, "-"))
    return Stage("check", command, _remote(choices), ("convert",))


def _expand(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
    options = {**(recipe.expand or {}), **choices.options.get("expand", {})}
    command = ("expand", str(folder / "convert"), "--output_dir", str(folder / "expand"), *_flags(options, "_"))
    return Stage("expand", command, _remote(choices), ("convert",))


def _train(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
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
    hardware = (*(["--use_cpu"] if choices.device == "cpu" else []), *_remote(choices))
    all_settings = {**recipe.training, **options}
    file = tuple(sorted((name, str(value)) for name, value in recipe.training.items() if name not in options))
    rows = choices.processes * rows_per_process(all_settings)
    return Stage("train", ("train", str(recipe.training_file), *flags), hardware, (before,), file, rows=rows)


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


def _verify(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
    command = ("verify", str(folder / RESULT), *_flags(choices.options.get("verify", {}), "-"))
    return Stage("verify", command, _remote(choices), (RESULT,))


def _measure(name: str, recipe: Recipe, folder: Path, choices: Choices) -> Stage:
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
    return Stage(name, command, (*device, *cache, *_remote(choices)), ("convert", RESULT))


def _card(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
    measured = [name for name in MEASURES if name in recipe.measure]
    results = [str(folder / name / MEASURES[name]) for name in measured]
    repository = {} if choices.push is None else {"repo": choices.push}
    options = _flags({**repository, **choices.options.get("card", {})}, "-")
    command = ("card", str(folder / RESULT), "--results", *results, *options)
    return Stage("card", command, (), (RESULT, "verify", *measured))


def _push(recipe: Recipe, folder: Path, choices: Choices) -> Stage:
    assert choices.push is not None
    command = ("push", str(folder / RESULT), choices.push, *_flags(choices.options.get("push", {}), "-"))
    trial = ("--dry-run",) if choices.dry_run else ()
    return Stage("push", command, trial, (RESULT, "verify", "card"), trial=choices.dry_run)


def _remote(choices: Choices) -> tuple[str, ...]:
    return ("--trust-remote-code",) if choices.trust_remote_code else ()


def _flags(options: Mapping[str, Any], between: str) -> list[str]:
    """Options as flags; of "true" the name alone, of "false" nothing."""
    flags = []
    for name, value in options.items():
        if value != "false":
            flag = f"--{name.replace('_', between).replace('-', between)}"
            flags += [flag] if value == "true" else [flag, str(value)]
    return flags
