"""Short names of models for headings and figures, from paths and Hub names."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

Compared = TypeVar("Compared")
"""A `Comparison` or a `Diagnosis`."""

LONGEST = 18
"""Characters of a name that fit above a panel."""


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths, as few as distinguish the names; a remark in parentheses stays."""
    paths = [(PurePath(name.partition(" (")[0]).parts, "".join(name.partition(" (")[1:])) for name in names]
    for count in range(1, max(len(parts) for parts, _ in paths)):
        short = ["/".join(parts[-count:]) + remark for parts, remark in paths]
        if len({*short}) == len(names):
            return short
    return list(names)


def figure_names(names: Sequence[str]) -> list[str]:
    """Names of at most `LONGEST` characters, cut in the middle, and numbered if that makes them equal."""
    half = LONGEST // 2
    short = [name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    if len({*short}) == len(names):
        return short
    return [f"{index}: {name[: LONGEST - 4]}" for index, name in enumerate(names, 1)]


def with_names(result: Compared, names: Sequence[str]) -> Compared:
    """A comparison or diagnosis with other names for its models, in the same order."""
    compared: Any = result
    pairs = zip(compared.models, names, strict=True)
    models = tuple(replace(model, evaluation=replace(model.evaluation, model=name)) for model, name in pairs)
    return replace(compared, models=models)
