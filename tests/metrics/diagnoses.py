"""Diagnoses made by hand, of models trained on 16 tokens and read to 1,024, as in conftest.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate, PartResult, Role
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment
from hf_recurrent_lengthgen.metrics.remembrance.measure import Remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt
from hf_recurrent_lengthgen.metrics.states.result import (
    AttentionHarm,
    HeadPatching,
    HeadStates,
    PatchedHeads,
    StateDiagnosis,
    WindowHarm,
)
from tests.metrics.conftest import compared

POSITIONS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEADY = 0.3
"""Distance of heads that are not said to drift."""
Heads = Mapping[tuple[int, int], float]


def near(mean: float) -> Estimate:
    return Estimate(mean, mean - 0.01, mean + 0.01)


def head(
    layer: int, number: int, distance: float = STEADY, growth: float = 0.0, unit: str = "head", known: bool = True
) -> HeadStates:
    """Drifts if it is further than 1; holds 0.9 of the first token after 16 tokens if it drifts, else 0.1."""
    drifts = distance > 1
    curve = tuple(distance if position > 16 else 0.1 for position in POSITIONS)
    std = tuple(2.0 * max(1.0, position / 16) ** growth for position in POSITIONS)
    retention = tuple((-0.10536 if drifts else -2.30259) * position / 16 for position in POSITIONS)
    leaves_at = 32 if drifts else None
    return HeadStates(layer, unit, number, std, curve, distance, drifts, leaves_at, retention if known else None)


def states(
    drifting: Heads,
    harm: float = 1.0,
    restored: float = 0.97,
    others: float = 0.0,
    broken: Heads | None = None,
    layers: int = 2,
    heads: int = 4,
    unit: str = "head",
    known: bool = True,
) -> StateDiagnosis:
    """States of `layers` x `heads` heads, those of `drifting` at that distance, with these shares of the harm."""
    every = [(layer, number) for layer in range(layers) for number in range(heads)]
    groups = []
    if drifting:
        groups.append(PatchedHeads("those that drift", tuple(drifting), near(restored * harm), near(harm)))
    if rest := tuple(place for place in every if place not in drifting):
        groups.append(PatchedHeads("all others", rest, near(others * harm), near(0.0)))
    for place, share in (broken or {}).items():
        groups.append(PatchedHeads("alone", (place,), near(0.0), near(share * harm)))
    made = tuple(
        head(*place, drifting.get(place, STEADY), 0.5 if place in drifting else 0.0, unit, known) for place in every
    )
    patching = HeadPatching(1016, 8, 8, near(harm), tuple(groups))
    return StateDiagnosis(16, POSITIONS, 32, 0.95, (1.0,) * len(POSITIONS), made, patching)


def hybrid() -> StateDiagnosis:
    """Head 2 of layer 1 drifts and does most of the harm, attention little."""
    found: Any = states({(1, 2): 47.3})
    keys = PatchedHeads("attention", (), near(0.1), near(0.1))
    borders = (16, 64, 512)
    recurrent, attention = (tuple(map(near, values)) for values in ((0.0, 0.5, 1.2), (0.3, 0.0, 0.02)))
    harm, inside = (tuple(map(near, values)) for values in ((0.9, 0.42, 0.4, 1.3), (0.2, 0.01, 0.0, 0.0)))
    windows = WindowHarm((256, 512), (4, 8, 16, None), harm, inside)
    apart = AttentionHarm(borders, tuple(map(near, (0.1, 0.6, 1.3))), recurrent, attention, windows)
    patching = replace(found.patching, groups=(*found.patching.groups, keys))
    return replace(found, patching=patching, attention=apart)


def remembrance(beyond: float, length: int = 64) -> Remembrance:
    """Values that differ, so that only the one for the training length is `beyond`."""
    starts = (0, length - 16, length - 8) if length > 16 else (0, length - 8)
    values = tuple(near(value) for value in ((0.99, beyond, beyond + 0.1) if length > 16 else (beyond, beyond + 0.1)))
    return Remembrance(16, length, 32, 0.95, starts, values)


def constant_prompt(inside: float, beyond: float) -> ConstantPrompt:
    """Rises from 32 tokens on."""
    curve = Curve((0, 2, 16, 32, 1024), (9.0, inside, inside, beyond), None, None)
    return ConstantPrompt(13, 16, 1024, curve, inside, beyond, 2.0, 32 if beyond > 2 * inside else None)


def diagnosed(
    role: Role, label: str, harm: float, found: StateDiagnosis | None = None, width: float | None = 0.01
) -> DiagnosedModel:
    """A model with the parts that need no states, too."""
    parts: dict[str, PartResult] = {} if found is None else {"states": found}
    parts["remembrance"] = remembrance(0.2 if harm > 0.05 else 0.03)
    parts["misalignment"] = Misalignment(3.6, 3.59, 3.61, (3.59, 3.61))
    parts["constant prompt"] = constant_prompt(1.5, 4.0 if harm > 0.05 else 1.4)
    return DiagnosedModel(role, compared(role, label, harm, width).evaluation, parts, {})


def expected(base: Heads | None = None) -> Diagnosis:
    """The pair of the demo as it should come out; `base` has the heads that drift in the base, the furthest first."""
    drifting = base or {(1, 2): 47.3, (0, 3): 12.0, (0, 1): 3.0}
    broken = {place: 1.2 if index == 1 else 0.4 for index, place in enumerate(drifting)}
    return Diagnosis(
        "Why base fails",
        (
            diagnosed("base", "base", 1.4, states(drifting, broken=broken)),
            diagnosed("intervention", "sp", 0.02, states({}, harm=0.005)),
        ),
    )


def without_parts(model: DiagnosedModel, reason: str | None = None) -> DiagnosedModel:
    """Only the evaluation; states refused for a reason."""
    return DiagnosedModel(model.role, model.evaluation, {}, {} if reason is None else {"states": reason})


def with_part(model: DiagnosedModel, name: str, found: PartResult | None) -> DiagnosedModel:
    """The model with another result of a part; None takes the part away."""
    parts = {other: part for other, part in model.parts.items() if other != name}
    return replace(model, parts=parts if found is None else {name: found, **parts})


def states_of(model: DiagnosedModel) -> StateDiagnosis:
    found: Any = model.part(StateDiagnosis)
    return found
