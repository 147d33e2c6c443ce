"""Effective Remembrance: how much distant tokens change a prediction.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), Definition 3.3: EffRem_T(t) = d(q(.|x_{0:T}), q(.|x_{t:T})) for a
distance d of probability distributions, averaged over texts x. Glossary: `length` is T, `starts` are the t, q is the
prediction of the next token. d is the total variation (Eq. 3) and, if named, other `DISTANCES` (Appendix G).

t = T is refused: without any token there is no prediction.

Each start point is read separately, all sequences together.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import t_interval
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, chunk_borders, progress_bar, reading_plan
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode

START_POINTS = 64
LENGTHS_OF_TRAINING = 4
"""Default T in training lengths, as in the paper's figures."""


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
        settings: Confidence, progress, and sequences, and tokens of each, per forward pass.
        length: T; by default 4 training lengths.
        starts: The t, in any order, from 0 to T - 1; by default those of `start_points`.
        distances: Names of `DISTANCES` to measure in addition to total variation.

    Raises:
        ValueError: for unusable tokens, lengths, starts or distances, and for predictions that are not finite.
    """
    length = LENGTHS_OF_TRAINING * training_length if length is None else length
    starts = start_points(length, training_length) if starts is None else tuple(sorted(starts))
    names = tuple(dict.fromkeys(("total_variation", *distances)))
    values = remembrance_values(model, tokens, length, starts, distances=names, **settings.reading)
    by_name = {name: _estimates(values[:, index], settings.confidence) for index, name in enumerate(names)}
    variation = by_name.pop("total_variation")
    return Remembrance(training_length, length, len(values), settings.confidence, starts, variation, by_name)


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
    logits = 1 if reader.keeps else None
    batch, chunk = reading_plan(reader, len(array), length, batch_size, chunk_length, logits=logits)
    read = sorted({0, *starts})
    values = np.empty((len(array), len(distances), len(read)))
    total = len(array) * sum(length - start for start in read)
    with evaluation_mode(reader.model), progress_bar(total, "start points", progress) as bar:
        for first in range(0, len(array), batch):
            rows, whole = slice(first, first + batch), None
            for place, start in enumerate(read):
                prediction = _final_prediction(reader, array[rows, start:], chunk, first, start, bar)
                whole = prediction if whole is None else whole  # the first start is 0
                values[rows, :, place] = torch.stack([DISTANCES[name](whole, prediction) for name in distances], 1)
    return values[..., [read.index(start) for start in starts]].clip(max=1)


def _final_prediction(reader: Reader, ids: np.ndarray, chunk: int, first: int, start: int, bar: Any) -> Tensor:
    """q(.|x_{start:T}) after tokens (R, T - start) of the sequences from `first` on, (R, V) float64 on the CPU."""
    cache = None
    for begin, stop in chunk_borders(ids.shape[1], chunk):
        tokens = torch.from_numpy(ids[:, begin:stop].astype(np.int64)).to(reader.device)
        logits, cache = reader.read(tokens, cache, logits_to_keep=1)
        bar.update(tokens.numel())
    last = logits[:, -1].cpu().double()
    broken = (last.isnan() | (last == math.inf)).any(1) | (last == -math.inf).all(1)
    if bool(broken.any()):
        sequence = first + int(broken.nonzero()[0])
        raise ValueError(
            f"The prediction after token {start + stop} of sequence {sequence}, read from token {start} on, is not "
            "finite: the model overflows there or has broken weights. Evaluate in float32, or a shorter length."
        )
    return last.softmax(-1)
