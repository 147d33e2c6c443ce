"""Statistics of the state at chosen positions of long streams, and of the inputs of the recurrence.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 3.5 and appendix C: mean and standard deviation of each layer
and head over time. Chen et al., 2024 (arXiv:2410.07145), section 3.2 and appendix G: the same for the convolution
part, outlier channels, Delta_t, B_t and x_t over time, and the retention of the first token, alpha_{2:t} (Eq. 6, whose
product starts after the token itself).

States are read from `final_state` at the end of a chunk, so `stream_nll` collects the statistics on its way:

    observer = StateObserver(model, len(tokens), positions)
    with observer:
        nll = stream_nll(model, tokens, observer=observer).nll
    trajectory = observer.trajectory()

Position n is after n tokens were read. Statistics are taken per unit: a head, or a group of neighbouring channels if
the recurrent part has channels instead, (B, D, N) in Mamba-1. Shapes: n positions, S sequences, U units, E elements of
a unit.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.evaluation.recorded_scans import SUMS, ScanSums, recorded_scans
from hf_recurrent_lengthgen.evaluation.streaming import Chunk
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting

CHANNEL_GROUPS = 16
"""Maximum number of channel groups in a layer without heads."""
SKETCHED_ELEMENTS = 256
"""Number of elements from which the distribution of a unit is estimated; moments and extremes use all elements."""
RANK_TOLERANCE, RANKED_MATRICES = 1e-4, 1024
"""Epsilon of effective ranks, and about how many are taken at a position: in a large model, of the first texts."""
SKETCH_SIZES = (1, 1, 2, 4, 8, *[16] * 14, 8, 4, 2, 1, 1)
"""Sizes of the groups of sorted elements whose means are stored: smaller at the ends, where outliers are."""


def sample_positions(length: int, training_length: int) -> tuple[int, ...]:
    """Positions at which states are taken.

    Powers of two up to half of the training length T, multiples of T / 8 from there to T, two per doubling beyond T,
    and `length` as the last.
    """
    early = [2**k for k in range(training_length.bit_length()) if 2**k < training_length / 2]
    inside = [math.ceil(training_length * k / 8) for k in range(4, 9)]
    doublings = max(0.0, math.log2(length / training_length))
    later = [round(training_length * 2 ** (k / 2)) for k in range(1, math.ceil(doublings * 2))]
    return tuple(sorted({position for position in (*early, *inside, *later) if position < length} | {length}))


class PartStatistics(NamedTuple):
    """Mean and population variance over the elements of each unit, for one part of a layer's state, (n, S, U) each.

    `extreme` is the value of the largest magnitude.
    """

    mean: np.ndarray
    variance: np.ndarray
    extreme: np.ndarray


class InputStatistics(NamedTuple):
    """Inputs of a layer's recurrence, (n, S, U) each; means are over the tokens since the previous position.

    Attributes:
        log_retention: log of the mean over a unit's states of alpha_{2:n}, the share that is left after n tokens of
            what the first token wrote. Computed from sums of log decays, so that it does not underflow.
        log_decay: Mean of log alpha_t.
        key, value: Mean norms of B_t (keys), before Delta, and of x_t (values); mean magnitude in Mamba-1.
        step: Mean of Delta_t; None for families without steps.
    """

    log_retention: np.ndarray
    log_decay: np.ndarray
    key: np.ndarray
    value: np.ndarray
    step: np.ndarray | None


class LayerTrajectory(NamedTuple):
    """One layer over time, in units ("head" or "channel group") of a shape.

    Attributes:
        recurrent: Statistics of the recurrent part; None for a layer without one.
        sketch: (n, S, U, G): means of G groups of neighbours among the sorted elements of a unit; None if `recurrent`
            is.
        masses: (G,): the share of the elements in each group.
        conv_parts, conv: Names of the parts of the convolution state, which are its units, and their statistics; None
            without such a state.
        inputs: None if the layer's scan is not known to this package.
        ranks: (n, R, M, 2): `effective_ranks` of the `matrices_of` the state in the first R sequences; None if M is 0.
    """

    unit: str
    shape: tuple[int, ...]
    recurrent: PartStatistics | None
    sketch: np.ndarray | None
    masses: np.ndarray
    conv_parts: tuple[str, ...]
    conv: PartStatistics | None
    inputs: InputStatistics | None
    ranks: np.ndarray | None


class StateTrajectory(NamedTuple):
    """The layers of a model at `positions`."""

    positions: tuple[int, ...]
    layers: tuple[LayerTrajectory, ...]


def as_units(recurrent: Tensor) -> Tensor:
    """(B, H, P, N) as (B, H, P * N); channels (B, D, ...) as groups (B, U, D / U * ...) with U at most 16."""
    if recurrent.ndim == 4:
        return recurrent.flatten(2)
    channels = recurrent.shape[1]
    groups = max(count for count in range(1, CHANNEL_GROUPS + 1) if channels % count == 0)
    return recurrent.reshape(len(recurrent), groups, -1)


def matrices_of(recurrent: Tensor, conv: Tensor) -> Tensor:
    """The matrices (B, M, P, N) of a layer's state: of heads, or in Mamba-1 one (D, N); none of xLSTM."""
    if recurrent.ndim == 3 and recurrent.shape[1] == conv.shape[1]:  # the D channels of Mamba-1
        return recurrent[:, None]
    return recurrent if recurrent.ndim == 4 else recurrent.new_empty(len(recurrent), 0, 1, 1)


def effective_ranks(matrices: Tensor) -> Tensor:
    """Effective rank of matrices (..., P, N), counted and by entropy, as (..., 2) in float64; 0 for zeros.

    Of singular values s_i: #{i : s_i > 1e-4 s_1} (Sun et al., 2026, arXiv:2602.02195, Eq. 6); exp(-sum p_i log p_i),
    p_i = s_i / sum_j s_j (Roy and Vetterli, 2007, Definition 2), in which small ones hardly count.
    """
    # squares in float64 have all that a float32 state holds, at a fraction of the time of singular values
    exact = (matrices.cpu() if matrices.device.type == "mps" else matrices).double()
    exact = exact if exact.shape[-2] <= exact.shape[-1] else exact.mT
    squares = torch.linalg.eigvalsh(exact @ exact.mT)  # ascending
    values = torch.where(squares > torch.finfo(torch.float32).eps ** 2 * squares[..., -1:], squares, 0).sqrt()
    counted = (values > RANK_TOLERANCE * values[..., -1:]).sum(-1).double()
    shares = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.stack([counted, torch.special.entr(shares).sum(-1).exp() * (counted > 0)], -1)


class StateObserver:
    """Takes the statistics of a stream, as the `observer` of `stream_nll`.

    As a context manager around the reading, it also records the inputs of the recurrence if the layers' scans are
    known; otherwise `inputs` of the layers are None. `positions` increase from 1 or more.
    """

    def __init__(self, model: nn.Module, sequences: int, positions: Sequence[int]) -> None:
        self._model: Any = base_of(model)
        self._blocks: Any = getattr(getattr(self._model, "base_model", None), "layers", ())
        self.positions = tuple(positions)
        """Where the stream has to stop."""
        self._places = {position: place for place, position in enumerate(positions)}
        mixers = dict(enumerate(getattr(block, "scan_mixer", None) for block in self._blocks))
        zero = self._model.zero_state(1)
        self._layouts = [
            _Layout.of(layer.recurrent, layer.conv, getattr(mixers.get(index), "conv_parts", {}))
            for index, layer in enumerate(zero)
        ]
        self._ranked = max(1, RANKED_MATRICES // max(1, sum(matrices_of(*layer[:2]).shape[1] for layer in zero)))
        self._seen = np.zeros((len(positions), sequences), dtype=bool)
        self._stored: dict[str, np.ndarray] = {}
        self._calls: dict[int, list[ScanSums]] = {}
        self._running: dict[str, Tensor] = {}
        self._recording = ExitStack()

    def __enter__(self) -> "StateObserver":
        # a recurrence that is made to forget gets other inputs than its layer computed
        if len(self._blocks) and not Forgetting.of(self._model.config).in_recurrence:
            readers = {name: partial(self._read, sums) for name, sums in SUMS.items()}
            self._recording.enter_context(recorded_scans(self._model, readers))
        return self

    def __exit__(self, *_: Any) -> None:
        self._recording.close()

    def _read(self, sums: Callable[..., ScanSums], layer: int, *args: Tensor) -> None:
        self._calls.setdefault(layer, []).append(sums(*args))

    @torch.inference_mode()
    def see(self, first_sequence: int, chunk: Chunk) -> None:
        tokens = chunk.nll.shape[1]
        rows = slice(first_sequence, first_sequence + len(chunk.nll))
        self._add_calls(chunk.start == 0, tokens)
        place = self._places.get(chunk.start + tokens)
        if place is None:
            return
        for layer, (layout, state) in enumerate(zip(self._layouts, chunk.state, strict=True)):
            if layout.units:
                units = as_units(state[0])
                self._store(f"{layer}.recurrent", place, rows, _statistics(units))
                ordered = units[..., layout.sketched.to(units.device)].sort(-1).values
                self._store(f"{layer}.recurrent", place, rows, {"sketch": ordered @ layout.groups.to(ordered)})
                self._store(f"{layer}.inputs", place, rows, self._inputs(layer, layout.units))
            if (few := matrices_of(*state[:2])[: max(0, self._ranked - first_sequence)]).numel():
                first = slice(first_sequence, first_sequence + len(few))
                self._store(str(layer), place, first, {"ranks": effective_ranks(few)})
            if layout.conv:
                parts = [
                    _statistics(part.flatten(1)[:, None]) for part in state[1].split(list(layout.conv.values()), 1)
                ]
                joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
                self._store(f"{layer}.conv", place, rows, joined)
        self._running = {name: total for name, total in self._running.items() if name.endswith("retained")}
        self._seen[place, rows] = True

    def _store(self, part: str, place: int, rows: slice, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            array = value.cpu().numpy()
            size = (*self._seen.shape, *array.shape[1:])
            self._stored.setdefault(f"{part}.{name}", np.zeros(size, array.dtype))[place, rows] = array

    def _add_calls(self, begins: bool, tokens: int) -> None:
        """Add up the recorded inputs of the scans in a chunk."""
        if begins:
            self._running = {}
        for layer, calls in self._calls.items():
            if begins:
                self._running[f"{layer}.retained"] = -calls[0].first_log_decay
            for sums in calls:
                self._add(f"{layer}.retained", sums.log_decay)
                for name in ("log_decay", "key", "value", "step"):
                    if (total := getattr(sums, name)) is not None:
                        self._add(f"{layer}.{name}", total)
            self._add(f"{layer}.tokens", torch.tensor(float(tokens)))
        self._calls = {}

    def _add(self, name: str, more: Tensor) -> None:
        self._running[name] = self._running[name] + more if name in self._running else more

    def _inputs(self, layer: int, units: int) -> dict[str, Tensor]:
        """The entries of `InputStatistics` since the last position, (B, U) each; empty if nothing was recorded."""
        if f"{layer}.retained" not in self._running:
            return {}
        retained = self._running[f"{layer}.retained"].unflatten(1, (units, -1)).flatten(2)
        tokens = self._running[f"{layer}.tokens"]
        statistics = {"log_retention": retained.logsumexp(-1) - math.log(retained.shape[-1])}
        for name in ("log_decay", "key", "value", "step"):
            if (total := self._running.get(f"{layer}.{name}")) is not None:
                statistics[name] = (total / tokens).reshape(len(total), units, -1).mean(-1)
        return statistics

    def trajectory(self) -> StateTrajectory:
        """The statistics; a `ValueError` unless all positions of all sequences were seen."""
        if not self._seen.all():
            place, sequence = np.argwhere(~self._seen)[0]
            raise ValueError(
                f"Sequence {sequence} was not read to position {self.positions[place]}: pass this observer to "
                "stream_nll, with as many sequences of at least this length."
            )
        return StateTrajectory(self.positions, tuple(map(self._layer, range(len(self._layouts)), self._layouts)))

    def _layer(self, layer: int, layout: "_Layout") -> LayerTrajectory:
        def statistics(part: str, kind: type[Any]) -> Any:
            """The statistics of a part; None if there are none."""
            entries = {name: self._stored.get(f"{layer}.{part}.{name}") for name in kind._fields}
            return kind(**entries) if any(entry is not None for entry in entries.values()) else None

        ranks = self._stored.get(f"{layer}.ranks")
        return LayerTrajectory(
            layout.unit,
            layout.shape,
            statistics("recurrent", PartStatistics),
            self._stored.get(f"{layer}.recurrent.sketch"),
            layout.groups.count_nonzero(0).numpy() / max(1, len(layout.groups)),
            tuple(layout.conv),
            statistics("conv", PartStatistics),
            statistics("inputs", InputStatistics),
            None if ranks is None else ranks[:, : self._ranked],
        )


class _Layout(NamedTuple):
    """The units of a layer's state: their kind, number (0 without a recurrent part) and shape.

    `sketched` are the elements from which the distribution of a unit is estimated, `groups` (sketched, G) averages
    neighbours among them, and `conv` has the channels of the parts of the convolution state.
    """

    unit: str
    units: int
    shape: tuple[int, ...]
    sketched: Tensor
    groups: Tensor
    conv: dict[str, int]

    @classmethod
    def of(cls, recurrent: Tensor, conv: Tensor, parts: dict[str, int]) -> "_Layout":
        sections = {}
        if conv[0].numel():
            sections = parts if sum(parts.values()) == conv.shape[1] else {"x": conv.shape[1]}
        if not recurrent[0].numel():
            return cls("", 0, (), torch.zeros(0, dtype=torch.long), torch.zeros(0, 0), sections)
        units, elements = as_units(recurrent).shape[1:]
        heads = recurrent.ndim == 4
        shape = recurrent.shape[2:] if heads else (recurrent.shape[1] // units, *recurrent.shape[2:])
        unit = "head" if heads else "channel group"
        return cls(unit, units, tuple(shape), *_sketch_of(elements), sections)


def _statistics(units_BUE: Tensor) -> dict[str, Tensor]:
    variance, mean = torch.var_mean(units_BUE, -1, correction=0)
    extreme = units_BUE.gather(-1, units_BUE.abs().argmax(-1, keepdim=True))[..., 0]
    return {"mean": mean, "variance": variance, "extreme": extreme}


def _sketch_of(elements: int) -> tuple[Tensor, Tensor]:
    """The sketched elements of a unit, and the matrix that averages them by group once they are sorted."""
    chosen = torch.randperm(elements, generator=torch.Generator().manual_seed(0))[:SKETCHED_ELEMENTS]
    ends = np.cumsum((0, *SKETCH_SIZES)) / SKETCHED_ELEMENTS
    borders = sorted({round(len(chosen) * end) for end in ends})
    groups = torch.zeros(len(chosen), len(borders) - 1)
    for group, (start, stop) in enumerate(pairwise(borders)):
        groups[start:stop, group] = 1 / (stop - start)
    return chosen, groups
