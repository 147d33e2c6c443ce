"""Maps between the tensors of another layout and ours: data, and pure functions of tensors.

A map is a sequence of `Rename`; "{layer}" in a name stands for each layer. `to_ours` and `to_theirs` take
`TensorFiles`, check all names and shapes before any tensor is read, and return the entries to write.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.conversion.tensor_writing import Entry


class Transform(NamedTuple):
    """A function of tensors and its exact inverse; both must also work on the meta device.

    `to_ours` takes the tensors of their names, in order, and returns those of our names.
    """

    to_ours: Callable[..., Tensor | Sequence[Tensor]]
    to_theirs: Callable[..., Tensor | Sequence[Tensor]]


SAME = Transform(lambda tensor: tensor, lambda tensor: tensor)


@dataclass(frozen=True)
class Rename:
    """One entry of a map: names in a foreign checkpoint, names in ours, and the transform of the values.

    A name may contain "{layer}". Several names on a side are tensors that the transform takes or returns together.
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    transform: Transform = SAME

    @property
    def their_names(self) -> tuple[str, ...]:
        return _as_tuple(self.theirs)

    @property
    def our_names(self) -> tuple[str, ...]:
        return _as_tuple(self.ours)

    @property
    def inverse(self) -> "Rename":
        return Rename(self.ours, self.theirs, Transform(*reversed(self.transform)))

    def of_layer(self, layer: int) -> "Rename":
        theirs, ours = (
            tuple(name.replace("{layer}", str(layer)) for name in names)
            for names in (self.their_names, self.our_names)
        )
        return Rename(theirs, ours, self.transform)


def expand(renames: Iterable[Rename], layers: int) -> list[Rename]:
    """All entries of a map with numbers for "{layer}", in the order of the layers."""
    parts: tuple[list[Rename], ...] = [], [], []  # before, in and after the layers
    for rename in renames:
        in_layers = "{layer}" in "".join(rename.their_names + rename.our_names)
        parts[1 if in_layers else 2 if parts[1] else 0].append(rename)
    return parts[0] + [rename.of_layer(layer) for layer in range(layers) for rename in parts[1]] + parts[2]


def to_theirs(
    renames: Sequence[Rename], ours: Any, expected: Mapping[str, tuple[int, ...]], where: str
) -> list[Entry]:
    """Entries of all their tensors, made from ours; as `to_ours`, and `expected` has the shapes of ours, too."""
    stored = {name: meta.shape for name, meta in ours.metas.items()}
    wrong = [
        f"{name} has the shape {list(stored[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    return to_ours([rename.inverse for rename in renames], ours, None, where, misshapen=wrong)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """One name or tensor, or several."""
    return (value,) if isinstance(value, str | Tensor) else tuple(value)


def to_ours(
    renames: Sequence[Rename],
    theirs: Any,
    expected: Mapping[str, tuple[int, ...]] | None,
    where: str,
    ignored: Iterable[str] = (),
    misshapen: Sequence[str] = (),
) -> list[Entry]:
    """Entries of all our tensors, made from theirs; tensors of the names `ignored` may exist and are not used.

    `expected` has the shapes of all our tensors. Raises a `ValueError` that lists all tensors that are missing or
    unexpected, or have another shape or mixed dtypes, with the problems that are `misshapen`.
    """
    needed = [name for rename in renames for name in rename.their_names]
    missing = [name for name in needed if name not in theirs.metas]
    unexpected = sorted(theirs.metas.keys() - {*needed, *ignored})
    entries: list[Entry] = []
    for rename in renames:
        if not any(name in missing for name in rename.their_names):
            made, problems = _made(rename, theirs, expected)
            entries += made
            misshapen = [*misshapen, *problems]
    unmade = set(expected or ()) - {name for rename in renames for name in rename.our_names}
    assert not unmade, f"the map makes no {sorted(unmade)}"
    all_problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(all_problems.values()):
        words = "; ".join(f"{what}: {', '.join(names)}" for what, names in all_problems.items() if names)
        raise ValueError(f"The weights in {where} do not fit its config, {words}.")
    return entries


def _made(
    rename: Rename, source: Any, expected: Mapping[str, tuple[int, ...]] | None
) -> tuple[list[Entry], list[str]]:
    """The entries that a rename makes, and the errors in their shapes."""
    theirs, made = rename.their_names, rename.our_names
    metas = [source.metas[name] for name in theirs]
    blank = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in metas]
    if len({meta.dtype for meta in metas}) > 1:
        return [], [f"{', '.join(theirs)} have several dtypes"]
    try:
        results = _as_tuple(rename.transform.to_ours(*blank))
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(str(list(meta.shape)) for meta in metas)
        return [], [f"{', '.join(theirs)} of {shapes} ({str(error).partition(chr(10))[0]})"]
    assert len(results) == len(made), rename
    problems = []
    for name, result in zip(made, results, strict=True):
        if expected is not None and tuple(result.shape) != expected.get(name):
            got = f" as {name}" if theirs != (name,) else ""
            want = f"{list(expected[name])}" if name in expected else "nothing of that name"
            problems.append(f"{', '.join(theirs)}{got} has the shape {list(result.shape)} instead of {want}")

    def read(position: int) -> Tensor:
        return _as_tuple(rename.transform.to_ours(*[source.tensor(name) for name in theirs]))[position]

    entries = [
        Entry(name, tuple(result.shape), result.dtype, partial(read, position))
        for position, (name, result) in enumerate(zip(made, results, strict=True))
    ]
    return entries, problems
