"""Results of the diagnosis of a model's states, as typed values with a strict JSON form, which figures are made from.

Positions are numbers of tokens read. Every curve has one value per position of the diagnosis. A unit is a head, or a
group of neighbouring channels if a layer has no heads. `distance.py` defines distances, `patching.py` patching.
"""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult

Values = tuple[float, ...]
FEWEST_SEQUENCES = 4
"""Minimum number of sequences for calling something a drift."""


@dataclass(frozen=True)
class HeadStates:
    """One unit of the recurrent part of a layer over time; its kind is `unit`, "head" or "channel group".

    Attributes:
        std: Standard deviation over all sequences and all elements.
        distance, late_distance, drifts, leaves_at: See `distance.Drift`.
        log_retention: Of `trajectory.InputStatistics`, mean over sequences; None if the layer's scan is not known.
        mean: Mean over all sequences and all elements.
        largest: Magnitude of the largest element: far above `std` if few channels explode (Chen et al., Figure 6).
        inputs: The rest of `trajectory.InputStatistics`, if known, "step", "key" and "value" among them (Figure 7:
            Delta_t, B_t, x_t), mean over sequences.
    """

    layer: int
    unit: str
    head: int
    std: Values
    distance: Values
    late_distance: float
    drifts: bool
    leaves_at: int | None
    log_retention: Values | None
    mean: Values = ()
    largest: Values = ()
    inputs: dict[str, Values] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in texts: "layer 3, head 5"."""
        return f"layer {self.layer}, {self.unit} {self.head}"


@dataclass(frozen=True)
class ConvStates:
    """A part ("x", "B", "C", ...) of the convolution state of a layer (Chen et al., 2024, Figure 17).

    `mean` and `std` are over all sequences and elements.
    """

    layer: int
    part: str
    mean: Values
    std: Values


@dataclass(frozen=True)
class StateRank:
    """`effective_ranks` of a head's state, or of the one matrix of a layer (None), mean over texts; at most `most`."""

    layer: int
    head: int | None
    most: int
    counted: Values
    entropy: Values


@dataclass(frozen=True)
class PatchedHeads:
    """An exchange of some heads (layer, head), or, without heads, of the keys and values of attention.

    `restored` is the decrease of the NLL if only they are taken from the short context, `broken` the increase if only
    they are taken from the long one.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    restored: Estimate
    broken: Estimate

    @property
    def attention(self) -> bool:
        return not self.heads


@dataclass(frozen=True)
class HeadPatching:
    """Heads exchanged between the states after `position` tokens and after the last `kept` of them.

    `harm` is the NLL over the `width` tokens after the exchange from the former minus that from the latter, paired.
    """

    position: int
    kept: int
    width: int
    harm: Estimate
    groups: tuple[PatchedHeads, ...]

    @property
    def harmful(self) -> bool:
        """Whether the lower bound of the excess loss is above zero; only then do shares of it have a meaning."""
        return self.harm.low is not None and self.harm.low > 0

    def share(self, estimate: Estimate) -> float | None:
        """`restored` or `broken` of a group as a share of the excess loss; None if there is none."""
        return estimate.mean / self.harm.mean if self.harmful else None


AS_GOOD = 0.01
"""Nats per token by which a larger window of attention may be worse than the best one."""


@document("window_harm")
@dataclass(frozen=True)
class WindowHarm:
    """Excess loss from context by window of attention, in nats per token (`attention_windows.py`).

    Entry i was read with a window of `windows[i]` tokens, the last with full attention (None): `harm`, the excess loss
    over the positions `last_range` ([start, stop)), and the loss `inside` the training length minus that with full
    attention.
    """

    last_range: tuple[int, int]
    windows: tuple[int | None, ...]
    harm: tuple[Estimate, ...]
    inside: tuple[Estimate, ...]

    @property
    def best(self) -> int | None:
        """The largest window not worse than the best, at no cost inside the training length; None: full attention."""
        within = [
            (window, harm.mean)
            for window, harm, inside in zip(self.windows, self.harm, self.inside, strict=True)
            if inside.mean <= AS_GOOD
        ]
        least = min(harm for _, harm in within)
        return [window for window, harm in within if harm <= least + AS_GOOD][-1]

    def at(self, window: int | None) -> Estimate:
        return self.harm[self.windows.index(window)]


@dataclass(frozen=True)
class AttentionHarm:
    """Excess loss from long recurrent states and from long attention, each alone, in nats per token (`attention.py`).

    Entry i is measured after `borders[i]` tokens, compared with the same tokens read from neither; `both` is that from
    both together. `windows` has the excess loss by window of attention.
    """

    borders: tuple[int, ...]
    both: tuple[Estimate, ...]
    recurrent: tuple[Estimate, ...]
    attention: tuple[Estimate, ...]
    windows: WindowHarm | None = None

    def best_window(self, training_length: int) -> int | None:
        """The window that removes most of the excess loss, T if none was measured; None if it is not attention's."""
        if self.attention[-1].mean <= max(self.recurrent[-1].mean, 0.5 * self.both[-1].mean):
            return None
        return training_length if self.windows is None else self.windows.best


@document("state_diagnosis", version=6)
@dataclass(frozen=True)
class StateDiagnosis(PartResult):
    """The states of one model on one set of sequences, after the numbers of tokens in `positions`.

    Attributes:
        std: Standard deviation of the whole recurrent state, all layers together.
        heads: The units of all layers that have a recurrent state.
        patching: None if heads were not patched.
        attention: In hybrids, what long states and long attention do each alone.
        conv: The parts of the convolution states of all layers that have one.
        ranks: Of all layers whose state is made of matrices; empty in files of earlier versions.
    """

    training_length: int
    positions: tuple[int, ...]
    sequences: int
    confidence: float
    std: Values
    heads: tuple[HeadStates, ...]
    patching: HeadPatching | None
    left_out: tuple[str, ...] = ()
    attention: AttentionHarm | None = None
    conv: tuple[ConvStates, ...] = ()
    ranks: tuple[StateRank, ...] = ()

    @property
    def names_heads(self) -> bool:
        """Whether there were enough texts to say which heads drift."""
        return self.sequences >= FEWEST_SEQUENCES

    @property
    def last_inside(self) -> int:
        """Place of the last position inside the training length."""
        return max(place for place, n in enumerate(self.positions) if n <= self.training_length)

    @property
    def ranking(self) -> tuple[HeadStates, ...]:
        """All heads: drifting heads first, both kinds by decreasing distance in the last doubling of the position."""
        return tuple(sorted(self.heads, key=lambda head: (not head.drifts, -head.late_distance)))

    @property
    def drifting(self) -> tuple[HeadStates, ...]:
        """The heads that drift, by decreasing distance."""
        return tuple(head for head in self.ranking if head.drifts)
