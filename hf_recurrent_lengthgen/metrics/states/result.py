"""Results of the diagnosis of a model's states, as typed values with a strict JSON form, which figures are made from.

Positions are numbers of tokens read. Every curve has one value per position of the diagnosis. A unit is a head, or a
group of neighbouring channels if a layer has no heads. Statistics are over all sequences and all elements of a unit.
`distance.py` defines distances, `patching.py` patching.
"""

from dataclasses import dataclass

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult
from hf_recurrent_lengthgen.metrics.attention.result import AttentionHarm

Values = tuple[float, ...]
FEWEST_SEQUENCES = 4
"""Minimum number of sequences for calling something a drift."""


@dataclass(frozen=True)
class Extremes:
    """The value of the largest magnitude at each position, and its index in the flattened unit."""

    value: Values
    index: tuple[int, ...]


@dataclass(frozen=True)
class RecurrenceInputs:
    """Inputs of a head's recurrence: `trajectory.InputStatistics`, as means over sequences."""

    log_retention: Values
    log_decay: Values
    key: Values
    value: Values
    step: Values | None


@dataclass(frozen=True)
class HeadStates:
    """One unit of the recurrent part over time.

    Attributes:
        std, mean, extremes: Statistics of the state.
        distance, late_distance, null, drifts, leaves_at, growth: See `distance.Drift`.
        mean, extremes, inputs: None for heads without details.
        inputs: None also if the layer's scan is not known.
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
    """One layer: std of its whole recurrent part, its units (`unit` is their kind), its convolution parts.

    `shape` is the shape of a unit, (P, N) for a head. A layer without recurrent part has no `std` and no units.
    """

    layer: int
    unit: str
    shape: tuple[int, ...]
    std: Values | None
    heads: tuple[HeadStates, ...]
    conv: tuple[ConvStates, ...]

    @property
    def leaves_at(self) -> int | None:
        """Where the first of its heads leaves training, see `distance.Drift`; None if none is known to."""
        return min((head.leaves_at for head in self.heads if head.leaves_at is not None), default=None)


@dataclass(frozen=True)
class PatchedHeads:
    """An exchange of some heads, given as (layer, head), or of the keys and values of all attention layers.

    `restored` is the decrease of the NLL if only they are taken from the short context, `broken` the increase if only
    they are taken from the long one.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    restored: Estimate
    broken: Estimate
    attention: bool = False


@dataclass(frozen=True)
class HeadPatching:
    """Heads exchanged between the states after `position` tokens (`full`) and after the last `kept` of them (`short`).

    The NLL is over the `width` tokens after the exchange; `harm` is `full` minus `short`, paired.
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
        """Whether the lower bound of the harm is above zero; only then do shares of it have a meaning."""
        return self.harm.low is not None and self.harm.low > 0

    def share(self, estimate: Estimate) -> float | None:
        """`restored` or `broken` of a group as a share of the harm; None if there is no harm."""
        return estimate.mean / self.harm.mean if self.harmful else None


@document("state_diagnosis", version=3)
@dataclass(frozen=True)
class StateDiagnosis(PartResult):
    """The states of one model on one set of sequences, after the numbers of tokens in `positions`.

    Attributes:
        smallest_drift: Least distance that counts as a drift.
        std: Standard deviation of the whole recurrent state, all layers together.
        layers: Layers that have a state.
        patching: None if heads were not patched.
        attention: In hybrids, what long states and long attention do each alone.
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
    attention: AttentionHarm | None = None

    def __post_init__(self) -> None:
        positions = self.positions
        if not positions or positions != tuple(sorted({*positions})) or positions[0] < 1:
            raise ValueError(f"positions must increase strictly and be at least 1, got {positions}.")
        curves = {"std": self.std}
        for layer in self.layers:
            if layer.std is not None:
                curves[f"std of layer {layer.layer}"] = layer.std
            for head in layer.heads:
                name = f"layer {layer.layer}, head {head.head}"
                curves |= {f"std of {name}": head.std, f"distance of {name}": head.distance}
        for name, curve in curves.items():
            if len(curve) != len(positions):
                raise ValueError(f"{name} must have one value per position, {len(positions)}, got {len(curve)}.")

    @property
    def names_heads(self) -> bool:
        """Whether there were enough texts to say which heads drift."""
        return self.sequences >= FEWEST_SEQUENCES

    @property
    def ranking(self) -> tuple[tuple[LayerStates, HeadStates], ...]:
        """All heads with their layers: drifting heads first, both kinds by decreasing distance in the last octave."""
        heads = [(layer, head) for layer in self.layers for head in layer.heads]
        return tuple(sorted(heads, key=lambda pair: (not pair[1].drifts, -pair[1].late_distance)))

    @property
    def drifting(self) -> tuple[tuple[LayerStates, HeadStates], ...]:
        """The heads that drift, by decreasing distance."""
        return tuple(pair for pair in self.ranking if pair[1].drifts)


def head_name(layer: LayerStates, head: HeadStates) -> str:
    """Name of a head in texts: "layer 3, head 5"."""
    return f"layer {layer.layer}, {layer.unit} {head.head}"
