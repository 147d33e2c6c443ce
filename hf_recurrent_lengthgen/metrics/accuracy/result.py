"""How many symbols models copy, recall or sort right, by the length of the string."""

from dataclasses import dataclass

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import ModelResult, check_comparison
from hf_recurrent_lengthgen.metrics.retrieval.result import Share


@dataclass(frozen=True)
class LengthAccuracy:
    """Right symbols, and right whole answers, for strings of one length (of so many pairs in recall)."""

    length: int
    symbols: Share
    answers: Share


@document("accuracy", version=2)
@dataclass(frozen=True, kw_only=True)
class AccuracyResult(ModelResult):
    """One model on one task of `data/tasks/strings.py`.

    Attributes:
        training_length: Symbols (pairs in recall) of the longest string in training; None where it is not known.
        task, vocabulary: Name of the task, and its number of symbols.
        lengths: In ascending order.
        data: The digest is the SHA-256 of the token ids of all strings, as int64.
    """

    training_length: int | None
    task: str
    vocabulary: int
    lengths: tuple[LengthAccuracy, ...]


@document("accuracy_comparison", version=2)
@dataclass(frozen=True)
class AccuracyComparison:
    """Several models on the same strings, in the order they are shown."""

    models: tuple[AccuracyResult, ...]

    def __post_init__(self) -> None:
        check_comparison(self.models, "task", "vocabulary", "data")
