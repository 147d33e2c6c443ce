"""What an evaluation found, as typed values with a strict JSON form; pictures and pages read only this.

Units: NLL, loss and harm in nats per token, positions and lengths in tokens, time in seconds. Position t is scored
with t + 1 tokens of context. Every interval is the two-sided t-interval over sequences at the confidence of the
result, paired where it belongs to a difference; bounds are None with fewer than two sequences.
"""

import json
import math
import sys
import types
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1
"""Raised with every change that an older reader cannot understand."""


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

    @property
    def perplexity(self) -> tuple[float, ...]:
        """exp of the mean NLL of each bin, for a curve of NLL."""
        return tuple(math.exp(mean) if mean < 700 else math.inf for mean in self.mean)


@dataclass(frozen=True)
class TwoResolutions:
    """The same per-token values over two sets of bins: `fine` to study, `coarse` to see trends."""

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
class DataRecord:
    """What was read: a description for people, the SHA-256 of the token ids, and what one token is."""

    description: str
    digest: str
    token_unit: str


@dataclass(frozen=True)
class EvaluationResult:
    """One model on one set of sequences."""

    model: str
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


@dataclass(frozen=True)
class TrainingRecord:
    """How a model came about: method and settings in words, steps, wall-clock seconds, last training loss."""

    method: str
    steps: int
    seconds: float
    loss: float


Role = Literal["base", "cured", "control", "other"]
"""base: the model before the intervention; cured: after it; control: after equally many plain steps."""


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison; `training` is None when we did not train it."""

    role: Role
    evaluation: EvaluationResult
    training: TrainingRecord | None


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


AnyDocument = EvaluationResult | Comparison | ForgettingSearch
Document = TypeVar("Document", EvaluationResult, Comparison, ForgettingSearch)
_KINDS: dict[type, str] = {
    EvaluationResult: "evaluation",
    Comparison: "comparison",
    ForgettingSearch: "forgetting_search",
}


def to_json(document: AnyDocument) -> str:
    """The JSON text of a document, with its kind and schema version.

    Raises:
        ValueError: naming the first value that is NaN, infinite or of a wrong type.
    """
    plain = _plain(document)
    _decode(plain, type(document), "")  # the reader's own checks: nothing is written that it would refuse
    return json.dumps({"kind": _KINDS[type(document)], "schema_version": SCHEMA_VERSION, **plain}, indent=1)


def from_json(text: str, kind: type[Document]) -> Document:
    """Read what `to_json` wrote.

    Args:
        text: The JSON text.
        kind: EvaluationResult, Comparison or ForgettingSearch.

    Raises:
        ValueError: for text that is not JSON, another kind, a schema version this code does not know, and for
            every missing, unknown, doubled or wrongly typed entry or value that is not finite, by its path.
    """
    try:
        plain = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not JSON ({error}); the file may be cut off.") from error
    if not isinstance(plain, dict) or plain.get("kind") != _KINDS[kind]:
        found = plain.get("kind") if isinstance(plain, dict) else type(plain).__name__
        raise ValueError(f"Expected a document of kind {_KINDS[kind]!r}, got {found!r}.")
    version = plain.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(
            f"The document has schema version {version!r}, this code reads {SCHEMA_VERSION}: update "
            "hf_recurrent_lengthgen if it is newer, else repeat the evaluation."
        )
    body = {key: value for key, value in plain.items() if key not in ("kind", "schema_version")}
    result: Document = _decode(body, kind, "")
    return result


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"Doubled entries: {sorted({key for key in keys if keys.count(key) > 1})}.")
    return entries


def _plain(value: Any) -> Any:
    """`value` as what JSON knows: dictionaries, lists and the scalars as they are."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _decode(value: Any, kind: Any, path: str) -> Any:
    """`value` (parsed JSON) as an instance of `kind`, a type made of the types in this file."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        names, hints = [field.name for field in fields(kind)], get_type_hints(kind)
        if missing := [name for name in names if name not in value]:
            raise ValueError(f"Missing in {path or 'the document'}: {missing}.")
        if unknown := [name for name in value if name not in names]:
            raise ValueError(f"Unknown in {path or 'the document'}: {unknown}; allowed are {names}.")
        decoded = {name: _decode(value[name], hints[name], f"{path}.{name}".lstrip(".")) for name in names}
        try:
            return kind(**decoded)  # type: ignore[operator]
        except ValueError as error:
            raise ValueError(f"In {path or 'the document'}: {error}") from error
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _decode(value, kind, path)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(_decode(item, item_kind, f"{path}[{index}]") for index, (item, item_kind) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: _decode(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    expected = "a finite number" if kind is float else f"of type {kind.__name__ if origin is None else kind}"
    raise ValueError(f"{path or 'The document'} must be {expected}, got {value!r:.80}.")
