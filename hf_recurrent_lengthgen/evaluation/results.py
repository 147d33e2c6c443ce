"""Results of evaluations, as typed values with a strict JSON form, which figures and pages are made from.

Units: NLL, loss and harm in nats per token, positions and lengths in tokens, time in seconds. Position t is scored
with t + 1 tokens of context. Every interval is the two-sided t-interval over sequences at the confidence of the
result, paired for differences. Bounds are None with fewer than two sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hf_recurrent_lengthgen.evaluation.json_schema import AnyDocument, document


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences and its interval."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """Means over disjoint position bins: bin i holds the positions edges[i] <= t < edges[i + 1]."""

    edges: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None

    def __post_init__(self) -> None:
        bins = len(self.edges) - 1
        if bins < 1 or any(right <= left for left, right in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"A curve needs at least two strictly increasing edges, got {self.edges}.")
        for name in ("mean", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != bins:
                raise ValueError(f"A curve with {bins} bins needs {bins} values in '{name}', got {len(values)}.")
        if (self.low is None) != (self.high is None):
            raise ValueError("A curve needs both bounds, low and high, or neither.")


@dataclass(frozen=True)
class TwoResolutions:
    """The same per-token values over two sets of bins."""

    fine: Curve
    coarse: Curve


@dataclass(frozen=True)
class ContextHarm:
    """NLL with the whole context minus NLL of the same tokens with at most the training length of context.

    `last` is the mean over the positions `last_range` ([start, stop)). `harmful_from` is the start of the first
    coarse bin whose lower bound exceeds `threshold`; None if there is none.
    """

    curves: TwoResolutions
    last_range: tuple[int, int]
    last: Estimate
    threshold: float
    harmful_from: int | None


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
    in which the lower bound of the excess is above log(1 + tolerance).
    """

    best_bin: tuple[int, int]
    best_nll: float
    excess: Curve
    tolerance: float
    holds_to: int
    violated_from: int | None


@dataclass(frozen=True)
class DataSource:
    """The source of texts.

    It is the dataset (`name`: "owner/texts", "text.txt", "passkey prompts"), its split, and the part that is used or
    what is made from it (`selection`: "documents of at least 100 tokens").
    """

    name: str
    split: str | None = None
    selection: str = ""
    sizes: str = ""

    @classmethod
    def of(cls, given: "DataSource | str") -> "DataSource":
        return given if isinstance(given, cls) else cls(str(given))

    @property
    def description(self) -> str:
        """All fields on one line."""
        name = f"{self.name}; {self.sizes}" if self.sizes else self.name
        return ", ".join([name, *([f"split {self.split}"] if self.split else []), *filter(None, [self.selection])])


NO_SOURCE = DataSource("")


@dataclass(frozen=True)
class DataRecord:
    """The texts read: their source, the SHA-256 of the token ids, and the name of one token ("byte")."""

    source: DataSource = NO_SOURCE
    digest: str = ""
    token_unit: str = "token"

    @property
    def description(self) -> str:
        return self.source.description


@dataclass(frozen=True)
class ForgettingRule:
    """Forgetting at inference, as in `models.scan_forgetting.Forgetting`; the defaults mean none."""

    retention: float = 1.0
    insertion: float = 1.0
    window: int | None = None
    delta_scale: float = 1.0


NO_FORGETTING = ForgettingRule()


@document("evaluation", version=3)
@dataclass(frozen=True)
class EvaluationResult:
    """One model on one set of sequences.

    Attributes:
        model, weights: Its name, and the SHA-256 of its parameters.
        training_length, evaluated_length, sequences: What it was trained on, and what was read.
        confidence: Of all intervals.
        data: The texts, their digest and the name of a token.
        position_wise: NLL by position.
        harm: What context beyond the training length costs; `harm.last` is the number for a table.
        in_window: NLL inside the training length; `in_window.loss` is the number for a table.
        verdict: Up to which position the model holds.
        device, versions, command, seed, wall_seconds: How it was measured.
        forgetting: The forgetting in its config.
    """

    model: str
    weights: str
    training_length: int
    evaluated_length: int
    sequences: int
    confidence: float
    data: DataRecord
    position_wise: TwoResolutions
    harm: ContextHarm
    in_window: InWindow
    verdict: LengthVerdict
    device: str
    versions: dict[str, str]
    command: str
    seed: int
    wall_seconds: float
    forgetting: ForgettingRule = NO_FORGETTING


class PartResult(AnyDocument):
    """Base of the results of a diagnosis part: a document about one model, which does not name model and data."""

    left_out: tuple[str, ...] = ()
    """What could not be measured, and why, in sentences."""

    def bins(self) -> Iterable[tuple[int, int, Estimate]]:
        """Values by range of positions [start, stop), for tables; by default none."""
        return ()


@dataclass(frozen=True)
class TrainingRecord:
    """How a model was trained: titles of the methods, steps, wall-clock seconds, mean training loss, and settings.

    `state_drop_probability` is None for methods without it, `learning_rate` if unknown.
    """

    methods: tuple[str, ...]
    steps: int
    seconds: float
    loss: float
    learning_rate: float | None = None
    state_drop_probability: float | None = None


Role = Literal["base", "cured", "control", "other"]
"""base: the model before the intervention; cured: after it; control: after equally many plain steps."""


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison; `training` is None if its training is not recorded."""

    role: Role
    evaluation: EvaluationResult
    training: TrainingRecord | None


@document("comparison", version=3)
@dataclass(frozen=True)
class Comparison:
    """Models evaluated on the same data, in the order in which they are shown."""

    title: str
    models: tuple[ComparedModel, ...]

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("A comparison needs at least one model, got none.")
        labels = [model.evaluation.model for model in self.models]
        if len(set(labels)) < len(labels):
            raise ValueError(f"The models of a comparison need different labels, got {labels}.")
        for name in ("digest", "token_unit"):
            if len(found := {getattr(model.evaluation.data, name) for model in self.models}) > 1:
                raise ValueError(f"The models of a comparison must have the same data {name}, got {sorted(found)}.")
