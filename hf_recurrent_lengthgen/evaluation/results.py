"""What an evaluation found, as typed values with a strict JSON form; pictures and pages read only this.

Units: NLL, loss and harm in nats per token, positions and lengths in tokens, time in seconds. Position t is scored
with t + 1 tokens of context. Every interval is the two-sided t-interval over sequences at the confidence of the
result, paired where it belongs to a difference; bounds are None with fewer than two sequences.
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
                raise ValueError(f"A curve with {bins} bins has {len(values)} values in '{name}'.")
        if (self.low is None) != (self.high is None):
            raise ValueError("A curve has either both bounds, low and high, or none.")


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
    """NLL from the zero state by position inside the training length, over windows laid across the sequences.

    `loss` is its mean; `context_use` the NLL in `early_band` minus that in `late_band` (positions [start, stop)):
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
    """Length generalization by Definition 3.2 of "Unexplored states" (arXiv:2507.02782), on logarithmic bins.

    The best bin inside the training length is `best_bin` (t*), with NLL `best_nll` (log p*). `excess` is the NLL
    of every bin minus that of t*, paired by sequence. The model holds to `holds_to`, the largest bin edge up to
    which every bin from t* on has perplexity at most p* (1 + tolerance), in the means. `violated_from` is the
    start of the first later bin in which the excess is above log(1 + tolerance) with its lower bound.
    """

    best_bin: tuple[int, int]
    best_nll: float
    excess: Curve
    tolerance: float
    holds_to: int
    violated_from: int | None


@dataclass(frozen=True)
class DataSource:
    """Where texts are from: the data set ("owner/texts", "text.txt", "passkey prompts"), and which part of it, or what
    is made of it (`selection`: "documents of at least 100 tokens").
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
        """All of it on one line."""
        name = f"{self.name}; {self.sizes}" if self.sizes else self.name
        return ", ".join([name, *([f"split {self.split}"] if self.split else []), *filter(None, [self.selection])])


NO_SOURCE = DataSource("")


@dataclass(frozen=True)
class DataRecord:
    """What was read: where it is from, the SHA-256 of the token ids, and what one token is."""

    source: DataSource = NO_SOURCE
    digest: str = ""
    token_unit: str = "token"

    @property
    def description(self) -> str:
        return self.source.description


@dataclass(frozen=True)
class ForgettingRule:
    """Forgetting at inference, as in `models.forgetting.Forgetting`; the defaults are none."""

    retention: float = 1.0
    insertion: float = 1.0
    window: int | None = None
    delta_scale: float = 1.0


NO_FORGETTING = ForgettingRule()


@document("evaluation", version=3)
@dataclass(frozen=True)
class EvaluationResult:
    """One model on one set of sequences.

    `weights` is the SHA-256 of its parameters, `forgetting` what its config says of it.
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
    """Base of what a part of a diagnosis found: a document, of one model, that says neither which nor on what data."""

    left_out: tuple[str, ...] = ()
    """What of it could not be measured and why, in sentences."""

    def bins(self) -> Iterable[tuple[int, int, Estimate]]:
        """Values of the range of positions [start, stop), for tables; none unless a part has some."""
        return ()


@dataclass(frozen=True)
class TrainingRecord:
    """How a model came about: titles of the methods, steps, wall-clock seconds, mean training loss, and settings.

    `state_drop_probability` is None for methods without it, `learning_rate` where it is not known.
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
    """One model of a comparison; `training` is None when we did not train it."""

    role: Role
    evaluation: EvaluationResult
    training: TrainingRecord | None


@document("comparison", version=3)
@dataclass(frozen=True)
class Comparison:
    """Models evaluated on the same data, in the order they are shown."""

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
                raise ValueError(f"The models of a comparison must share one data {name}, got {sorted(found)}.")


@dataclass(frozen=True)
class ForgettingTrial:
    """One setting of forgetting at inference (`models.forgetting.Forgetting`) and the mean loss under it.

    `losses` are those of each text; `gain` is the loss without forgetting minus this one, paired by text.
    """

    retention: float
    insertion: float
    window: int | None
    delta_scale: float
    losses: tuple[float, ...]
    loss: Estimate
    gain: Estimate


@document("forgetting_search", version=2)
@dataclass(frozen=True)
class ForgettingSearch:
    """Mean loss of whole texts of `length` positions under each setting; the first setting is no forgetting.

    `weights` is the SHA-256 of the model's parameters.
    """

    model: str
    weights: str
    length: int
    sequences: int
    confidence: float
    data: DataRecord
    trials: tuple[ForgettingTrial, ...]

    def __post_init__(self) -> None:
        if not self.trials:
            raise ValueError("A search needs at least one setting, got none.")
        first = self.trials[0]
        if (first.retention, first.insertion, first.window, first.delta_scale) != (1, 1, None, 1):
            raise ValueError(f"The first setting of a search must be no forgetting, got {first}.")
        if any(len(trial.losses) != self.sequences for trial in self.trials):
            raise ValueError(f"Each setting of a search must have the losses of all {self.sequences} texts.")

    @property
    def best(self) -> ForgettingTrial:
        """The setting of the least mean loss; the first of equals, so no forgetting rather than one without effect."""
        return min(self.trials, key=lambda trial: trial.loss.mean)
