"""The evaluation of a model on long texts, as typed values with a strict JSON form, and several evaluations together.

Position t is scored with t + 1 tokens of context; units are those of `evaluation/results.py`.
"""

from dataclasses import dataclass
from typing import Literal

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import (
    Curve,
    Estimate,
    ModelResult,
    StoredRole,
    TrainingRecord,
    check_comparison,
)

FIGURE = "context_harm.figure.position_wise_figure"


@dataclass(frozen=True)
class TwoResolutions:
    """The same per-token values over two sets of bins."""

    fine: Curve
    coarse: Curve


@dataclass(frozen=True)
class ContextHarm:
    """NLL with the whole context minus NLL of the same tokens with at most the training length of context.

    `last` is the mean over the positions `last_range` ([start, stop)). `harmful_from` is the start of the first
    coarse bin that is shown to be above `threshold`, with one confidence for all bins; None if there is none.
    """

    curves: TwoResolutions
    last_range: tuple[int, int]
    last: Estimate
    threshold: float
    harmful_from: int | None

    @property
    def onset(self) -> str:
        """`harmful_from` as text: "1,024", "nowhere", or "unknown" where one text gives no bounds."""
        if self.harmful_from is not None:
            return f"{self.harmful_from:,}"
        return "nowhere" if self.curves.coarse.low else "unknown"


@dataclass(frozen=True)
class InWindow:
    """NLL from the zero state by position inside the training length, over windows that cover the sequences.

    `loss` is its mean. `context_use` is the NLL in `early_band` minus that in `late_band` (positions [start, stop)):
    above zero for a model that predicts better with more context.
    """

    curve: Curve
    loss: Estimate
    context_use: Estimate
    early_band: tuple[int, int]
    late_band: tuple[int, int]
    windows_per_sequence: int


@dataclass(frozen=True)
class LengthVerdict:
    """Length generalization by Definition 3.2 of Buitrago Ruiz and Gu, 2025, on logarithmic bins.

    The best bin inside the training length is `best_bin` (t*), with NLL `best_nll` (log p*). `excess` is the NLL
    of every bin minus that of t*, paired by sequence. `holds_to` is the largest bin edge up to which the mean
    perplexity of every bin from t* is at most p* (1 + tolerance). `violated_from` is the start of the first later bin
    in which the excess is shown to be above log(1 + tolerance), with one confidence for all bins and choices of t*.
    """

    best_bin: tuple[int, int]
    best_nll: float
    excess: Curve
    tolerance: float
    holds_to: int
    violated_from: int | None


@dataclass(frozen=True)
class TextMeans:
    """Means of each text, from which models are compared text by text; (S,) each, nats per token.

    `harm` and `loss` are over `ContextHarm.last_range`, `in_window` is over all windows of the text.
    """

    harm: tuple[float, ...]
    loss: tuple[float, ...]
    in_window: tuple[float, ...]


@document("evaluation", version=6, figure=FIGURE)
@dataclass(frozen=True, kw_only=True)
class EvaluationResult(ModelResult):
    """One model on one set of sequences.

    Attributes:
        training_length, evaluated_length, sequences: What it was trained on, and what was read.
        confidence: Of all intervals.
        position_wise: NLL by position; its exp is the perplexity that figures show.
        harm: Excess loss from context beyond the training length; `harm.last` is the number for a table.
        in_window: NLL inside the training length; `in_window.loss` is the number for a table.
        verdict: Up to which position the model generalizes.
        by_text: The numbers for a table of each text; None in older files.
        mean_perplexity: Mean over texts of exp(NLL) by position, Definition 3.1 of Buitrago Ruiz and Gu, 2025; None in
            older files. A few tokens make up most of it, so it may be many times the exp of `position_wise`.
    """

    training_length: int
    evaluated_length: int
    sequences: int
    confidence: float
    position_wise: TwoResolutions
    harm: ContextHarm
    in_window: InWindow
    verdict: LengthVerdict
    by_text: TextMeans | None = None
    mean_perplexity: TwoResolutions | None = None

    @property
    def models(self) -> tuple["ComparedModel"]:
        """Itself, as a comparison of one model."""
        return (ComparedModel("other", self, None),)


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison; `training` is None if its training is not recorded.

    `method` and `seed` name the folder of a method that was trained with several seeds, and the seed; else empty.
    """

    role: StoredRole
    evaluation: EvaluationResult
    training: TrainingRecord | None
    method: str = ""
    seed: str = ""


@dataclass(frozen=True)
class Difference:
    """Means of a model or method minus those of another, with paired intervals over `count` texts or seeds."""

    model: str
    minus: str
    over: Literal["texts", "seeds"]
    count: int
    harm: Estimate
    loss: Estimate
    in_window: Estimate


@document("comparison", version=6, figure=FIGURE)
@dataclass(frozen=True)
class Comparison:
    """Models evaluated on the same data, in the order in which they are shown, and their `differences`."""

    title: str
    models: tuple[ComparedModel, ...]
    differences: tuple[Difference, ...] = ()

    def __post_init__(self) -> None:
        check_comparison([model.evaluation for model in self.models], "data.digest", "data.token_unit")
