"""Results of the diagnoses, as typed values with a strict JSON form, which figures and pages are made from.

Units and intervals are those of `results`. A value does not name its model and data; the result that holds it does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import (
    ComparedModel,
    Comparison,
    Curve,
    Estimate,
    EvaluationResult,
    PartResult,
    Role,
)
from hf_recurrent_lengthgen.evaluation.state_results import StateDiagnosis  # noqa: F401  # a part, known when read

Found = TypeVar("Found", bound=PartResult)


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


@document("misalignment")
@dataclass(frozen=True)
class Misalignment(Estimate, PartResult):
    """Long-short misalignment (Du et al., 2025, Eq. 2) in nats, inside the training length, also by sequence.

    It is not 0 for equal predictions, so compare it only between models on the same text.
    """

    by_sequence: tuple[float, ...]


@document("constant_prompt")
@dataclass(frozen=True)
class ConstantPrompt(PartResult):
    """NLL of a prompt of one repeated token (the "newlines" prompt of Chen et al., 2024, section 4).

    `inside` is the highest bin inside the training length without the first bin, `beyond` the highest bin beyond it.
    `exceeded_from` is the start of the first bin beyond the training length above `factor` times `inside`. If there is
    none, it is None, and the model is said to have forgotten the beginning of the prompt.
    """

    token: int
    training_length: int
    length: int
    curve: Curve
    inside: float
    beyond: float
    factor: float
    exceeded_from: int | None


@dataclass(frozen=True)
class DiagnosedModel:
    """The results for one model.

    `parts` holds results by the name of the part, `refused` the reason for each part that could not be measured.
    """

    role: Role
    evaluation: EvaluationResult
    parts: dict[str, PartResult]
    refused: dict[str, str]

    def found(self, kind: type[Found]) -> Found | None:
        """The first part of the given type, or None."""
        return next((part for part in self.parts.values() if isinstance(part, kind)), None)


@document("diagnosis", version=2)
@dataclass(frozen=True)
class Diagnosis:
    """Models diagnosed on the same data, in the order in which they are shown."""

    title: str
    models: tuple[DiagnosedModel, ...]

    def __post_init__(self) -> None:
        _ = self.comparison  # checks that the models can be compared

    @property
    def comparison(self) -> Comparison:
        """The evaluations without the parts."""
        return Comparison(self.title, tuple(ComparedModel(m.role, m.evaluation, None) for m in self.models))
