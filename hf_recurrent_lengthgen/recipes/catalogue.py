"""Recipes of the papers' post-trained checkpoints: one YAML file each in checkpoints/, read strictly.

`lengthgen recipe` runs them. A file may begin with "like: NAME". It then contains only the entries that differ from
that recipe.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hf_recurrent_lengthgen.papers import PAPERS, Paper

RECIPES = Path(__file__).parent
CHECKPOINTS = RECIPES / "checkpoints"

Options = dict[str, str]
"""Options of a command by name, as text; "true" for those without a value."""


@dataclass(frozen=True)
class Citation:
    """Where the checkpoint is described: the arXiv number of a paper in `papers.PAPERS`, and "4.4, B.2, Figure 5"."""

    arxiv: str
    places: str

    @property
    def published(self) -> Paper:
        return PAPERS[self.arxiv]


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    Args:
        model: Name on the Hub.
        format: Its layout: "mamba-ssm", "transformers", "fla", "rwkv", "rwkv-hf", "rwkv7-hf".
        family: "mamba", "mamba2", "gla", "rwkv6".
        training_length: Training length in tokens.
        revision: Branch, tag or commit. A run records the commit.
        tokenizer: Name on the Hub; None for its own.
        remote_code: Whether its tokenizer is Python code in its repository.
        note: A note for people, such as how it differs from that of the paper.
    """

    model: str
    format: str
    family: str
    parameters: int
    training_length: int
    revision: str = "main"
    tokenizer: str | None = None
    remote_code: bool = False
    note: str = ""


@dataclass(frozen=True)
class Data:
    """The training and evaluation text: "the Pile", how to get it, and its license or access, if known."""

    name: str
    where: str
    note: str = ""


@dataclass(frozen=True)
class Train:
    """The training.

    Args:
        file: Settings of `lengthgen train`, relative to the folder of the recipes.
        options: Options that differ from the file.
        missing: Options that a person must give, with the reason.
    """

    file: str
    options: Options = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """The results that the paper reports, and where."""

    what: str
    source: str


@dataclass(frozen=True)
class Recipe:
    """One post-trained checkpoint.

    Args:
        name: Name of the file, without ".yaml".
        title: Title for people.
        measure: Options of the commands that measure it and its base.
        hardware: Hardware of the authors, or similar.
        data: Training and evaluation text; None for tasks without text.
        expand: Options of `lengthgen expand`; None without expansion.
        ours: Choices that are not from the paper.
        further: Commands for further measurements, which are not part of a run.
        folder: Folder of the recipes, which `train.file` is relative to.
    """

    name: str
    title: str
    paper: Citation
    source: Start
    train: Train
    measure: dict[Literal["evaluate", "diagnose", "retrieve"], Options]
    expected: tuple[Expected, ...]
    hardware: str = ""
    data: Data | None = None
    expand: Options | None = None
    ours: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    folder: Path = RECIPES

    @property
    def training_file(self) -> Path:
        return self.folder / self.train.file

    @cached_property
    def training(self) -> dict[str, Any]:
        """All training settings, as text."""
        return {**_mapping(self.training_file), **self.train.options}

    @property
    def rows(self) -> int:
        """Rows of an optimizer step."""
        training = self.training
        return int(training["per_device_train_batch_size"]) * int(training["gradient_accumulation_steps"])

    @property
    def tokens_per_step(self) -> int:
        return self.rows * int(self.training["training_length"])

    @property
    def steps(self) -> int:
        return int(self.training["max_steps"])

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def method(self) -> str:
        """The method of training, as text for people."""
        intervention = str(self.training["intervention"]).replace("_", " ")
        parts = [] if self.expand is None else ["expanded states"]
        parts += [intervention] if intervention != "none" else []
        parts += [f"output alignment {alpha}"] if float(alpha := self.training.get("alignment_alpha", "0")) else []
        task = self.training.get("task", "text")
        return " and ".join(parts or ["plain training"]) + ("" if task == "text" else f", {task}")


def recipe_names() -> list[str]:
    """Names of all recipes of this package."""
    return sorted(path.stem for path in CHECKPOINTS.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """A recipe of this package by name, or of a .yaml file in a copy of the recipes by path.

    Raises:
        ValueError: if the recipe does not exist; for unknown, missing or wrongly typed entries; and for a training
            file that does not exist or lacks an entry for the token budget.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CHECKPOINTS / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, recipe_names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "lengthgen recipe list lists all."
        raise ValueError(f"There is no recipe {name}: {hint}")
    values = _mapping(path)
    if (base := values.pop("like", None)) is not None:
        parent = path.parent / f"{base}.yaml"
        if not parent.is_file() or "like" in (inherited := _mapping(parent)):
            raise ValueError(f"{path}: like names {base!r}, but must name a recipe beside it that has no like itself.")
        values = _merged(inherited, values)
    if given := values.keys() & {"name", "folder"}:
        raise ValueError(f"{path}: {', '.join(sorted(given))} follows from the file; leave it out.")
    values |= {"name": path.stem, "folder": path.resolve().parent.parent}
    try:
        (recipe,) = _ENTRIES.validate_python((_without_nothing(values),))
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(map(_problem, error.errors()))}") from error
    _check(recipe, path)
    return recipe


# A tuple passes its config on to the dataclass in it.
_ENTRIES = TypeAdapter(tuple[Recipe], config=ConfigDict(extra="forbid"))


def _problem(error: Any) -> str:
    """An error in a recipe with its place: "source.parameters: Input should be ..., got 'many'"."""
    place = ".".join(str(part) for part in error["loc"][1:] if part != "[key]")
    told = {"unexpected_keyword_argument": "there is no such entry", "missing": "is missing"}.get(error["type"])
    return f"{place}: " + (told or f"{error['msg']}, got {error['input']!r:.80}")


def _check(recipe: Recipe, path: Path) -> None:
    """Raise a `ValueError` for values that the types allow but that make no sense."""
    if recipe.paper.arxiv not in PAPERS:
        raise ValueError(f"{path}: paper.arxiv is {recipe.paper.arxiv!r}, but must be one of {', '.join(PAPERS)}.")
    if not recipe.training_file.is_file():
        raise ValueError(f"{path}: train.file is {recipe.train.file!r}, but {recipe.training_file} does not exist.")
    if not recipe.measure:
        raise ValueError(f"{path}: measure is empty; give evaluate, diagnose or retrieve.")
    given = recipe.train.options.keys() & {"model", "output_dir"}
    if given:
        raise ValueError(
            f"{path}: train.options has {', '.join(sorted(given))}, which a run sets itself: leave it out."
        )
    needed = ("per_device_train_batch_size", "gradient_accumulation_steps", "training_length", "max_steps")
    if lacking := [name for name in needed if name not in recipe.training]:
        raise ValueError(
            f"{path}: neither {recipe.train.file} nor train.options has {', '.join(lacking)}, which the number of "
            "tokens is computed from."
        )
    if (recipe.training.get("data") is None) != (recipe.data is None):
        raise ValueError(f"{path}: data must be described if, and only if, the training reads text.")


def _mapping(path: Path) -> dict[str, Any]:
    """A YAML file with all scalars as text, unchanged ("3e-5", "0.1")."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold 'name: value' lines, got {type(values).__name__}.")
    return values


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`: mappings entry by entry, other values as a whole."""
    both = {
        name: _merged(base[name], value) if isinstance(base.get(name), dict) and isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return {**base, **both}


def _without_nothing(value: Any) -> Any:
    """Without null entries, by which a recipe drops entries of the recipe that it is like."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nothing(item) for name, item in value.items() if item not in ("", "null", "~")}


def in_words(number: float) -> str:
    """ "52.4M", "10B" tokens or parameters, with three digits."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
