"""Names of models short enough for headings and figures: what people give are paths and names of the Hub."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from hf_recurrent_lengthgen.evaluation.diagnosis_results import Diagnosis

LONGEST = 18
"""Characters of a name that fit above a panel."""


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths, as few as tell the names apart; a remark in parentheses stays."""
    paths = [(PurePath(name.partition(" (")[0]).parts, "".join(name.partition(" (")[1:])) for name in names]
    for kept in range(1, max(len(parts) for parts, _ in paths)):
        short = ["/".join(parts[-kept:]) + remark for parts, remark in paths]
        if len({*short}) == len(names):
            return short
    return list(names)


def figure_names(names: Sequence[str]) -> list[str]:
    """Names of at most `LONGEST` characters, cut in the middle, and numbered if they are the same then."""
    half = LONGEST // 2
    short = [name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    if len({*short}) == len(names):
        return short
    return [f"{index}: {name[: LONGEST - 4]}" for index, name in enumerate(names, 1)]


def with_names(diagnosis: Diagnosis, names: Sequence[str]) -> Diagnosis:
    """A diagnosis with other names of its models, in their order."""
    return replace(
        diagnosis,
        models=tuple(
            replace(
                model,
                evaluation=replace(model.evaluation, model=name),
                states=None if model.states is None else replace(model.states, model=name),
            )
            for model, name in zip(diagnosis.models, names, strict=True)
        ),
    )
