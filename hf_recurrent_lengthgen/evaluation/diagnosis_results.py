"""What single diagnoses found, as typed values with a strict JSON form; pictures and pages read only this.

Units and intervals are those of `results`. Which model and data a value belongs to is said by what holds it.
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
    """Effective Remembrance (arXiv:2507.02782, Definition 3.3) at the end of texts of `length` tokens.

    Entry i of each distance is that between the predictions after all tokens and after those from `starts[i]` on,
    which are the last `length - starts[i]`: 0 where the tokens before make no difference, at most 1.
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
            raise ValueError(f"Starts must increase strictly inside [0, {self.length}), got {starts}.")
        for name in ("total_variation", "jensen_shannon", "cosine"):
            if len(getattr(self, name)) != len(starts):
                raise ValueError(f"{len(starts)} starts have {len(getattr(self, name))} values in '{name}'.")

    def at(self, start: int) -> Estimate:
        """Total variation for one of `starts`."""
        return self.total_variation[self.starts.index(start)]

    def bins(self) -> Iterable[tuple[int, int, Estimate]]:
        return ((start, self.length, value) for start, value in zip(self.starts, self.total_variation, strict=True))

    @property
    def beyond_training(self) -> Estimate | None:
        """Total variation by what lies further back than the training length; None if that was not measured."""
        start = self.length - self.training_length
        return self.at(start) if start in self.starts else None


@document("misalignment")
@dataclass(frozen=True)
class Misalignment(Estimate, PartResult):
    """Long-short misalignment ("Output Alignment", Eq. 2) in nats, inside the training length; that of each sequence.

    It is not 0 for equal predictions: it is compared between models on the same text.
    """

    by_sequence: tuple[float, ...]


@document("constant_prompt")
@dataclass(frozen=True)
class ConstantPrompt(PartResult):
    """NLL of a prompt of one repeated token (the "newlines" prompt of arXiv:2410.07145, section 4).

    `inside` is the highest bin within the training length, the first bin left out, `beyond` the highest after it.
    `exceeded_from` is the start of the first bin beyond the training length above `factor` times `inside`; None if
    there is none: then the model is said to have forgotten the prompt's beginning.
    """

    token: int
    training_length: int
    length: int
    curve: Curve
    inside: float
    beyond: float
    factor: float
    exceeded_from: int | None


@document("rank_correlation")
@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rank correlation of two numbers over a set of models.

    Attributes:
        metric, score: Names of the two numbers.
        coefficient: From -1 to 1; equal values share the mean of their ranks.
        p_value: Two-sided: the share of pairings that are at least as far from 0, of all pairings of the two sets of
            values (`exact`), or of `pairings` random ones.
        least_p_value: The least that p_value can be for so many models without equal values.
    """

    metric: str
    score: str
    models: tuple[str, ...]
    metric_values: tuple[float, ...]
    score_values: tuple[float, ...]
    coefficient: float
    p_value: float
    least_p_value: float
    pairings: int
    exact: bool


@dataclass(frozen=True)
class DiagnosedModel:
    """What was found about one model.

    `parts` are by the name of the part; `refused` says of those that could not be measured why.
    """

    role: Role
    evaluation: EvaluationResult
    parts: dict[str, PartResult]
    refused: dict[str, str]

    def found(self, kind: type[Found]) -> Found | None:
        """The first part of that type; None where there is none."""
        return next((part for part in self.parts.values() if isinstance(part, kind)), None)


@document("diagnosis", version=2)
@dataclass(frozen=True)
class Diagnosis:
    """Models diagnosed on the same data, in the order they are shown.

    `correlation` is that of misalignment and loss at long context over the models; None for fewer than three.
    """

    title: str
    models: tuple[DiagnosedModel, ...]
    correlation: RankCorrelation | None

    def __post_init__(self) -> None:
        _ = self.comparison  # its checks are those of the models together

    @property
    def comparison(self) -> Comparison:
        """The evaluations alone."""
        return Comparison(self.title, tuple(ComparedModel(m.role, m.evaluation, None) for m in self.models))
