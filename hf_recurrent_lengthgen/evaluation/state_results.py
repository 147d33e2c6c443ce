"""What a diagnosis of a model's states found, as typed values with a strict JSON form; pictures read only this.

Positions are numbers of tokens read. Every curve has one value per position of the diagnosis. A unit is a head, or a
group of neighbouring channels where a layer has no heads. Statistics are over all sequences and all elements of a
unit. How distances are defined is said in `state_distance.py`, how patching is done in `state_patching.py`.
"""

from dataclasses import dataclass

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult

Values = tuple[float, ...]
FEWEST_SEQUENCES = 4
"""Sequences that are needed to call something a drift."""


@dataclass(frozen=True)
class Extremes:
    """The value of the largest magnitude at each position, and where in the flattened unit it is."""

    value: Values
    index: tuple[int, ...]


@dataclass(frozen=True)
class RecurrenceInputs:
    """What a head's recurrence was fed: `state_trajectory.InputStatistics`, as means over sequences."""

    log_retention: Values
    log_decay: Values
    key: Values
    value: Values
    step: Values | None


@dataclass(frozen=True)
class HeadStates:
    """One unit of the recurrent part over time.

    Attributes:
        std, mean, extremes: Of the state.
        distance, late_distance, null, drifts, leaves_at, growth: See `state_distance.Drift`.
        mean, extremes, inputs: None for heads that are not among those in detail.
        inputs: None also where the layer's scan is not known.
    """

    head: int
    std: Values
    distance: Values
    late_distance: float
    null: float
    drifts: bool
    leaves_at: int | None
    growth: float
    mean: Values | None
    extremes: Extremes | None
    inputs: RecurrenceInputs | None


@dataclass(frozen=True)
class ConvStates:
    """One part of a layer's convolution (token shift) state over time."""

    name: str
    mean: Values
    std: Values
    extremes: Extremes


@dataclass(frozen=True)
class LayerStates:
    """One layer: std of its whole recurrent part, its units (`unit` says what they are), its convolution parts.

    `shape` is the shape of a unit: (P, N) of a head. A layer without recurrent part has no `std` and no units.
    """

    layer: int
    unit: str
    shape: tuple[int, ...]
    std: Values | None
    heads: tuple[HeadStates, ...]
    conv: tuple[ConvStates, ...]


@dataclass(frozen=True)
class PatchedHeads:
    """An exchange of some heads, given as (layer, head).

    `restored` is the NLL that goes away if they alone are taken from the short context, `broken` that which comes if
    they alone are taken from the long one.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    restored: Estimate
    broken: Estimate


@dataclass(frozen=True)
class HeadPatching:
    """Heads exchanged between the states after `position` tokens (`full`) and after the last `kept` of them (`short`).

    NLL is that of the `width` tokens after the exchange; `harm` is `full` minus `short`, paired.
    """

    position: int
    kept: int
    width: int
    full: Estimate
    short: Estimate
    harm: Estimate
    groups: tuple[PatchedHeads, ...]

    @property
    def harmful(self) -> bool:
        """Whether the harm is above zero with its lower bound; only then do shares of it mean something."""
        return self.harm.low is not None and self.harm.low > 0

    def share(self, estimate: Estimate) -> float | None:
        """Part of the harm that `restored` or `broken` of a group makes up; None where there is no harm."""
        return estimate.mean / self.harm.mean if self.harmful else None


@document("state_diagnosis", version=2)
@dataclass(frozen=True)
class StateDiagnosis(PartResult):
    """The states of one model on one set of sequences, looked at after so many tokens (`positions`).

    Attributes:
        smallest_drift: Distance below which nothing is called a drift.
        std: Standard deviation of the whole recurrent state, all layers together.
        layers: Those that have a state.
        patching: None where it was not done.
    """

    training_length: int
    positions: tuple[int, ...]
    sequences: int
    confidence: float
    smallest_drift: float
    std: Values
    layers: tuple[LayerStates, ...]
    patching: HeadPatching | None
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positions = self.positions
        if not positions or positions != tuple(sorted({*positions})) or positions[0] < 1:
            raise ValueError(f"Positions must rise from 1 on, got {positions}.")
        curves = {"std": self.std}
        for layer in self.layers:
            if layer.std is not None:
                curves[f"std of layer {layer.layer}"] = layer.std
            for head in layer.heads:
                name = f"layer {layer.layer}, head {head.head}"
                curves |= {f"std of {name}": head.std, f"distance of {name}": head.distance}
        for name, curve in curves.items():
            if len(curve) != len(positions):
                raise ValueError(f"{len(positions)} positions have {len(curve)} values of {name}.")

    @property
    def names_heads(self) -> bool:
        """Whether there were enough texts to say which heads drift."""
        return self.sequences >= FEWEST_SEQUENCES

    @property
    def ranking(self) -> tuple[tuple[LayerStates, HeadStates], ...]:
        """All heads with their layers: those that drift first, each kind by falling distance in the last octave."""
        heads = [(layer, head) for layer in self.layers for head in layer.heads]
        return tuple(sorted(heads, key=lambda pair: (not pair[1].drifts, -pair[1].late_distance)))

    @property
    def drifting(self) -> tuple[tuple[LayerStates, HeadStates], ...]:
        """The heads that drift, by falling distance."""
        return tuple(pair for pair in self.ranking if pair[1].drifts)


def head_name(layer: LayerStates, head: HeadStates) -> str:
    """ "layer 3, head 5": how a head is called in texts."""
    return f"layer {layer.layer}, {layer.unit} {head.head}"
