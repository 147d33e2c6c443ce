"""Effective Remembrance: how much distant tokens change a prediction.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), Definition 3.3: EffRem_T(t) = d(q(.|x_{0:T}), q(.|x_{t:T})) for a
distance d of probability distributions, averaged over texts x. Glossary: `length` is T, `starts` are the t, q is the
prediction of the next token. d is the total variation (Eq. 3) and, if named, other `DISTANCES` (Appendix G).

t = T is refused: without any token there is no prediction.

One sweep reads all start points: at each t a row in the zero state joins the batch, and all rows read the same next
tokens. With a model that carries keys and values, or nothing, each start point is read separately.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import t_interval
from hf_recurrent_lengthgen.evaluation.streaming import (
    LOGITS_PER_FORWARD,
    SHORTEST_CHUNK,
    STATES_PER_FORWARD,
    TOKENS_PER_FORWARD,
    Tokens,
    check_pieces,
    check_tokens,
    progress_bar,
    state_elements,
)
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.models.state_value import map_state

START_POINTS = 64
LENGTHS_OF_TRAINING = 4
"""Default T in training lengths, as in the paper's figures."""
Row = tuple[int, int]
"""Start point and sequence."""


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the sum of |p - q| (Eq. 3)."""
    return (p - q).abs().sum(-1) / 2


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon distance: the square root of the divergence in bits.

    With r = (p - q) / (p + q), the divergence is the sum of (p + q) ((1 + r) log2(1 + r) + (1 - r) log2(1 - r)) / 4.
    No term is below 0, so that nearly equal distributions do not cancel.
    """
    both = p + q
    r = (p - q) / both.where(both > 0, 1)
    nats = torch.special.xlog1py(1 + r, r) + torch.special.xlog1py(1 - r, -r)
    return ((both * nats).sum(-1) / (4 * math.log(2))).clamp(min=0).sqrt()


def cosine(p: Tensor, q: Tensor) -> Tensor:
    """1 - cosine similarity, as half the squared distance of the unit vectors, which does not cancel."""
    unit_p, unit_q = (x / x.norm(dim=-1, keepdim=True) for x in (p, q))
    return (unit_p - unit_q).square().sum(-1) / 2


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "total_variation": total_variation,
    "jensen_shannon": jensen_shannon,
    "cosine": cosine,
}
"""Of probabilities (..., V) and (..., V) -> (...): 0 for equal ones, 1 for those that share no token."""


def check_distances(names: Sequence[str]) -> None:
    """Refuse distances that do not exist."""
    if unknown := [name for name in names if name not in DISTANCES]:
        raise ValueError(f"Distances must be some of {', '.join(DISTANCES)}; got {', '.join(unknown)}.")


@document("remembrance", version=3)
@dataclass(frozen=True)
class Remembrance(PartResult):
    """Effective Remembrance (Buitrago Ruiz and Gu, 2025, Definition 3.3) at the end of texts of `length` tokens.

    Entry i of `total_variation` compares the prediction after all tokens with the prediction after the last
    `length - starts[i]` tokens. It is 0 if the tokens before `starts[i]` make no difference, and at most 1. `others`
    has the same in other `DISTANCES`, by name.
    """

    training_length: int
    length: int
    sequences: int
    confidence: float
    starts: tuple[int, ...]
    total_variation: tuple[Estimate, ...]
    others: dict[str, tuple[Estimate, ...]] = field(default_factory=dict)

    @property
    def distances(self) -> dict[str, tuple[Estimate, ...]]:
        return {"total_variation": self.total_variation, **self.others}

    def at(self, start: int) -> Estimate:
        """Total variation for one of `starts`."""
        return self.total_variation[self.starts.index(start)]

    def bins(self) -> Iterable[tuple[str, int, int, Estimate]]:
        for name, values in self.distances.items():
            metric = "remembrance" if name == "total_variation" else f"remembrance_{name}"
            yield from ((metric, start, self.length, value) for start, value in zip(self.starts, values, strict=True))

    @property
    def beyond_training(self) -> Estimate | None:
        """Total variation due to tokens further back than the training length; None if not measured."""
        start = self.length - self.training_length
        return self.at(start) if start > 0 and start in self.starts else None


def start_points(length: int, training_length: int, count: int = START_POINTS) -> tuple[int, ...]:
    """`count` evenly spaced points from 0, one a training length before the end, and some close to the end.

    The points close to the end are 1, 2, 4, ... tokens before it, as long as that is less than the even spacing.
    """
    even = {index * length // count for index in range(count)}
    close = {length - 2**power for power in range(math.ceil(math.log2(max(length / count, 1))))}
    return tuple(sorted(even | close | {max(length - training_length, 0)}))


def effective_remembrance(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    settings: EvaluationSettings = DEFAULTS,
    *,
    length: int | None = None,
    starts: Sequence[int] | None = None,
    distances: Sequence[str] = (),
) -> Remembrance:
    """Effective Remembrance at `length` for all start points, with intervals over sequences.

    Args:
        model: A causal language model, see `reader_of`.
        tokens: Token ids (S, at least `length`); the first `length` of each sequence are read.
        training_length: Tokens per training sequence.
        settings: Confidence, progress, and rows (a sequence from one start point) and tokens per forward pass.
        length: T; by default 4 training lengths.
        starts: The t, in any order, from 0 to T - 1; by default those of `start_points`.
        distances: Names of `DISTANCES` to measure beside total variation, which the result always has.

    Raises:
        ValueError: for unusable tokens, lengths, starts or distances, and for predictions that are not finite.
    """
    length = LENGTHS_OF_TRAINING * training_length if length is None else length
    starts = start_points(length, training_length) if starts is None else tuple(sorted(starts))
    names = tuple(dict.fromkeys(("total_variation", *distances)))
    values = remembrance_values(model, tokens, length, starts, distances=names, **settings.reading)
    found = {name: _estimates(values[:, index], settings.confidence) for index, name in enumerate(names)}
    variation = found.pop("total_variation")
    return Remembrance(training_length, length, len(values), settings.confidence, starts, variation, found)


def _estimates(values: np.ndarray, confidence: float) -> tuple[Estimate, ...]:
    mean, low, high = t_interval(values, confidence)
    bounds = ([None] * len(mean) if bound is None else bound.tolist() for bound in (low, high))
    return tuple(Estimate(*parts) for parts in zip(mean.tolist(), *bounds, strict=True))


@torch.inference_mode()
def remembrance_values(
    model: nn.Module,
    tokens: Tokens,
    length: int,
    starts: Sequence[int],
    *,
    distances: Sequence[str] = ("total_variation",),
    batch_size: int | None = None,
    chunk_length: int | None = None,
    progress: bool = True,
) -> np.ndarray:
    """D distances of each sequence and start, (S, D, n) float64, in the order of `distances` and `starts`; arguments
    and errors are those of `effective_remembrance`.
    """
    check_distances(distances)
    if len(starts) == 0 or len({*starts}) < len(starts) or min(starts) < 0 or max(starts) >= length:
        raise ValueError(
            f"starts must be one or more different positions from 0 to {length - 1}, got {tuple(starts)}; without any "
            f"token (t = {length}) there is no prediction."
        )
    reader = reader_of(model)
    array = check_tokens(tokens, reader.vocabulary, length - 1)[:, :length]
    batch, chunk, budget = sweep_plan(reader, length, len(starts), batch_size, chunk_length)
    read = sorted({0, *starts})
    values = np.empty((len(array), len(distances), len(read)))
    total = len(array) * sum(length - start for start in read)
    with evaluation_mode(reader.model), progress_bar(total, "start points", progress) as bar:
        together = max(1, batch // len(read)) if reader.carried_by_row else batch
        for first in range(0, len(array), together):
            group = range(first, min(first + together, len(array)))
            whole: Tensor | None = None
            for rows in row_batches(read, group, batch, reader.carried_by_row):
                predictions = final_predictions(reader, array, rows, chunk, budget, bar)
                # The first rows start at 0, one per sequence of the group.
                whole = predictions[: len(group)] if whole is None else whole
                for prediction, (start, sequence) in zip(predictions, rows, strict=True):
                    found = [float(DISTANCES[name](whole[sequence - first], prediction)) for name in distances]
                    values[sequence, :, read.index(start)] = found
    return values[..., [read.index(start) for start in starts]].clip(max=1)


def sweep_plan(
    reader: Reader, length: int, starts: int, batch_size: int | None, chunk_length: int | None
) -> tuple[int, int, int]:
    """Maximum rows, tokens per row and tokens of all rows in one forward pass."""
    check_pieces(batch_size, chunk_length)
    limit = TOKENS_PER_FORWARD if reader.keeps else LOGITS_PER_FORWARD // reader.vocabulary
    tokens = max(1, min(TOKENS_PER_FORWARD, limit))
    if batch_size is None:
        # Rows join after every length / starts tokens, so rows beyond a full pass of that many tokens do not help.
        piece = min(SHORTEST_CHUNK, max(1, length // starts)) if reader.carried_by_row else length
        state = max(1, state_elements(reader.model))
        batch_size = max(1, min(tokens // piece, LOGITS_PER_FORWARD // reader.vocabulary, STATES_PER_FORWARD // state))
    return batch_size, chunk_length or length, tokens


def row_batches(starts: Sequence[int], sequences: range, batch_size: int, joined: bool) -> Iterator[list[Row]]:
    """All (start, sequence) pairs ordered by start, in batches of at most `batch_size`; unless `joined`, one start per
    batch."""
    rows = [(start, sequence) for start in starts for sequence in sequences]
    parts = [rows] if joined else [list(part) for _, part in groupby(rows, key=lambda row: row[0])]
    for part in parts:
        for first in range(0, len(part), batch_size):
            yield part[first : first + batch_size]


def final_predictions(
    reader: Reader, array: np.ndarray, rows: Sequence[Row], chunk: int, budget: int, bar: Any
) -> Tensor:
    """q(.|x_{start:T}) of each row, (R, V) float64 on the CPU: the sweep of this module.

    `array` (S, T) holds the tokens. `chunk` and `budget` limit the tokens per row and of all rows in a forward pass.
    Rows are ordered by start, and have the same start unless the reader is `carried_by_row`.
    """
    cache = None
    for begin, end in pairwise([*sorted({start for start, _ in rows}), array.shape[1]]):
        reading = [row for row in rows if row[0] <= begin]
        if cache is not None:
            cache = add_rows(reader, cache, sum(start == begin for start, _ in reading))
        sequences = [sequence for _, sequence in reading]
        most = max(1, min(chunk, budget // len(reading))) if reader.carries else end - begin
        step = math.ceil((end - begin) / math.ceil((end - begin) / most))  # equal pieces, without a short last one
        for at in range(begin, end, step):
            ids = array[sequences, at : min(at + step, end)].astype(np.int64)
            logits, cache = reader.read(torch.from_numpy(ids).to(reader.device), cache, logits_to_keep=1)
            check_logits(logits, reading, at + ids.shape[1])
            bar.update(ids.size)
    return logits[:, -1].cpu().double().softmax(-1)


def add_rows(reader: Reader, cache: Any, count: int) -> Any:
    """The cache with `count` more rows at the end that have read nothing."""
    shaped = reader.state(reader.take_rows(cache, torch.zeros(count, dtype=torch.long)))
    learned = recorded(reader.model.config)["active"] is not None
    first = reader.model.first_state(count) if learned else map_state(torch.zeros_like, shaped)
    return reader.join_rows([cache, reader.begin(first)])


def check_logits(logits: Tensor, rows: Sequence[Row], stop: int) -> None:
    """Refuse logits (R, 1, V) that give no prediction, and name the first row with such."""
    broken = (logits.isnan() | (logits == math.inf)).flatten(1).any(1) | (logits == -math.inf).flatten(1).all(1)
    if bool(broken.any()):
        start, sequence = rows[int(broken.nonzero()[0])]
        raise ValueError(
            f"The prediction after token {stop} of sequence {sequence}, read from token {start} on, is not finite: "
            "the model overflows there or has broken weights. Evaluate in float32, or a shorter length."
        )
