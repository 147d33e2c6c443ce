"""The stages of a recipe: each is a command of `lengthgen` with a folder of its own."""

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
from hf_recurrent_lengthgen.recipes.catalogue import Options, Recipe

MEASURES = {"evaluate": "result.json", "diagnose": "result.json", "retrieve": "retrieval.json"}
"""The commands that measure, and their result files."""

RESULT = "train"
"""The stage whose folder becomes the checkpoint of the recipe."""


@dataclass(frozen=True)
class Choices:
    """What a person chooses for a run, in place of the values of the recipe and its training file.

    Args:
        source: Folder, file or name on the Hub.
        device: "cpu" or "cuda".
        push: owner/name on the Hub; None to push nothing.
        options: Further options by stage.
    """

    source: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    device: str = "cpu"
    push: str | None = None
    trust_remote_code: bool = False
    options: Mapping[str, Options] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: Name of the stage, and of its folder.
        command: A command of `lengthgen`, with the arguments that its result depends on.
        hardware: Further arguments, which say where it runs.
    """

    name: str
    command: tuple[str, ...]
    hardware: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The shell command."""
        return shlex.join(["lengthgen", *self.command, *self.hardware])

    @property
    def module(self) -> ModuleType:
        """The module of the command."""
        return importlib.import_module(f"hf_recurrent_lengthgen.cli.{self.command[0]}")


def stages(recipe: Recipe, folder: Path, choices: Choices) -> list[Stage]:
    """All stages of a recipe, in order.

    Raises:
        ValueError: for options of unknown stages, missing options, and remote code that is not trusted.
    """
    for name, why in recipe.train.missing.items():
        if name not in choices.options.get("train", {}):
            raise ValueError(f"{recipe.name} needs train.{name}, for {why}: give --set train.{name}=VALUE.")
    if recipe.source.remote_code and choices.source is None and not choices.trust_remote_code:
        raise ValueError(
            f"The tokenizer of {recipe.source.model} is Python code in its repository: read it, then give "
            "--trust-remote-code."
        )
    source, model = recipe.source, choices.source or recipe.source.model
    converted, trained = str(folder / "convert"), str(folder / RESULT)
    remote = ("--trust-remote-code",) if choices.trust_remote_code else ()

    def flags(name: str, usual: Mapping[str, Any]) -> list[str]:
        return _flags({**usual, **choices.options.get(name, {})})

    convert = {
        **({} if choices.source is not None or Path(model).exists() else {"revision": source.revision}),
        "tokenizer": choices.tokenizer or (source.tokenizer if choices.source is None else None) or "false",
        "training_length": str(source.training_length),
    }
    planned = [Stage("convert", ("convert", model, "--output", converted, *flags("convert", convert)))]
    planned.append(Stage("check", ("verify", model, converted, *flags("check", {})), remote))
    if recipe.expand is not None:
        command = ("expand", converted, "--output", str(folder / "expand"), *flags("expand", recipe.expand))
        planned.append(Stage("expand", command, remote))
    planned.append(_train(recipe, folder, choices, remote))
    planned.append(Stage("verify", ("verify", trained, *flags("verify", {})), remote))
    measured = [name for name in MEASURES if name in recipe.measure]
    planned += [_measure(name, recipe, folder, choices, remote) for name in measured]
    results = [str(folder / name / MEASURES[name]) for name in measured]
    card = ("card", trained, "--results", *results, *flags("card", {"repo": choices.push or "false"}))
    planned.append(Stage("card", card))
    if choices.push is not None:
        planned.append(Stage("push", ("push", trained, choices.push, *flags("push", {}))))
    names = [stage.name for stage in planned]
    if unknown := sorted(set(choices.options) - set(names)):
        raise ValueError(f"{recipe.name} has no stage {', '.join(unknown)}: its stages are {', '.join(names)}.")
    return planned


def _train(recipe: Recipe, folder: Path, choices: Choices, remote: tuple[str, ...]) -> Stage:
    before = "convert" if recipe.expand is None else "expand"
    options = {
        "model": str(folder / before),
        "output": str(folder / RESULT),
        **({"data": choices.data} if choices.data and recipe.data else {}),
        **recipe.train.options,
        **choices.options.get("train", {}),
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    hardware = (*(["--use-cpu"] if choices.device == "cpu" else []), *remote)
    return Stage("train", ("train", str(recipe.training_file), *flags), hardware)


def _measure(name: str, recipe: Recipe, folder: Path, choices: Choices, remote: tuple[str, ...]) -> Stage:
    measure: Mapping[str, Options] = recipe.measure  # type: ignore[assignment]
    options = {**measure[name], **choices.options.get(name, {})}
    data = None if recipe.data is None else choices.data or str(recipe.training["data"])
    if data is not None and not (name == "retrieve" and options.get("task", "passkey") == "passkey"):
        options = {"data": data, **options}
    if name != "retrieve":
        options = {"roles": "base,cured", **options}
    models = (str(folder / "convert"), str(folder / RESULT))
    command = (name, *models, "--output", str(folder / name), *_flags(options))
    device = () if "device" in options else ("--device", choices.device)
    return Stage(name, command, (*device, *remote))


def check_text(recipe: Recipe, choices: Choices) -> None:
    """Raise a `ValueError` if the text of the recipe is neither given nor at the place in its file."""
    if recipe.data is None or choices.data is not None or "data" in choices.options.get("train", {}):
        return
    usual = recipe.training["data"]
    if not Path(usual).exists():
        raise ValueError(f"{usual} does not exist: give --data, with {recipe.data.name} ({recipe.data.where}).")


def check_commands(planned: Sequence[Stage]) -> None:
    """Parse all commands before the first one runs; a `ValueError` names the stage with a wrong option."""
    for stage in planned:
        said = io.StringIO()
        arguments = [*stage.command[1:], *stage.hardware]
        try:
            with contextlib.redirect_stderr(said):
                if stage.name == "train":
                    read_options(arguments[1:], arguments[0])
                elif stage.name == "retrieve":  # its options depend on its task
                    stage.module.command_parser(arguments).parse_args(arguments)
                else:
                    stage.module.command_parser().parse_args(arguments)
        except SystemExit as error:
            wrong = said.getvalue().strip().splitlines()[-1:] or [str(error)]
            raise ValueError(f"Stage {stage.name}: {wrong[0]}") from error


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options as flags; "true" gives the name alone, "false" gives nothing."""
    flags = []
    for name, value in options.items():
        if value != "false":
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value == "true" else [flag, str(value)]
    return flags
