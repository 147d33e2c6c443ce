"""The result of a diagnosis, as a typed value with a strict JSON form, which figures and pages are made from."""

from dataclasses import dataclass
from typing import TypeVar

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import PartResult, StoredRole
from hf_recurrent_lengthgen.metrics.context_harm.result import FIGURE, ComparedModel, Comparison, EvaluationResult
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment
from hf_recurrent_lengthgen.metrics.remembrance.measure import Remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis

RESULTS: tuple[type[PartResult], ...] = (StateDiagnosis, Remembrance, Misalignment, ConstantPrompt)
"""Those that a file can hold; a new one is listed here, so that it can be read."""
Result = TypeVar("Result", bound=PartResult)


@dataclass(frozen=True)
class DiagnosedModel:
    """The results for one model.

    `parts` holds results by the name of the part, `refused` the reason for each part that could not be measured.
    """

    role: StoredRole
    evaluation: EvaluationResult
    parts: dict[str, PartResult]
    refused: dict[str, str]

    def part(self, kind: type[Result]) -> Result | None:
        """The first part of this type, or None."""
        return next((part for part in self.parts.values() if isinstance(part, kind)), None)


@document("diagnosis", version=5, figure=FIGURE)
@dataclass(frozen=True)
class Diagnosis:
    """Models diagnosed on the same data, in the order in which they are shown."""

    title: str
    models: tuple[DiagnosedModel, ...]

    def __post_init__(self) -> None:
        _ = self.comparison  # checks that the models can be compared

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.title, tuple(ComparedModel(m.role, m.evaluation, None) for m in self.models))
