"""Effective Remembrance as a typed value with a strict JSON form."""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult


@document("remembrance")
@dataclass(frozen=True)
class Remembrance(PartResult):
    """Effective Remembrance (Buitrago Ruiz and Gu, 2025, Definition 3.3) at the end of texts of `length` tokens.

    Entry i of each distance compares the prediction after all tokens with the prediction after the last
    `length - starts[i]` tokens. It is 0 if the tokens before `starts[i]` make no difference, and at most 1.
    """

    training_length: int
    length: int
    sequences: int
    confidence: float
    starts: tuple[int, ...]
    total_variation: tuple[Estimate, ...]
    jensen_shannon: tuple[Estimate, ...]
    cosine: tuple[Estimate, ...]

    def __post_init__(self) -> None:
        starts = self.starts
        if not starts or starts != tuple(sorted({*starts})) or starts[0] < 0 or starts[-1] >= self.length:
            raise ValueError(f"starts must increase strictly within [0, {self.length}), got {starts}.")
        for name in ("total_variation", "jensen_shannon", "cosine"):
            if len(getattr(self, name)) != len(starts):
                raise ValueError(
                    f"'{name}' must have one value per start, {len(starts)}, got {len(getattr(self, name))}."
                )

    def at(self, start: int) -> Estimate:
        """Total variation for one of `starts`."""
        return self.total_variation[self.starts.index(start)]

    def bins(self) -> Iterable[tuple[int, int, Estimate]]:
        return ((start, self.length, value) for start, value in zip(self.starts, self.total_variation, strict=True))

    @property
    def beyond_training(self) -> Estimate | None:
        """Total variation due to tokens further back than the training length; None if not measured."""
        start = self.length - self.training_length
        return self.at(start) if start in self.starts else None
