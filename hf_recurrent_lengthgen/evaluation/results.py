"""Results of evaluations, as typed values with a strict JSON form, which figures and pages are made from.

Units: NLL, loss and excess loss in nats per token, positions and lengths in tokens, time in seconds. Position t is
scored with t + 1 tokens of context. Every interval is the two-sided t-interval over sequences at the confidence of the
result, paired for differences. Bounds are None with fewer than two sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_recurrent_lengthgen.evaluation.json_schema import AnyDocument

LARGEST_NLL = 300.0
"""Perplexity counts a larger NLL as this, so that squares of perplexities fit into float64."""


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
        sizes = {len(self.edges) - 1, *(len(bins) for bins in (self.mean, self.low, self.high) if bins is not None)}
        ascending = list(self.edges) == sorted(set(self.edges))
        if not ascending or len(sizes) != 1 or sizes == {0} or (self.low is None) != (self.high is None):
            raise ValueError(
                f"A curve needs strictly increasing edges, got {self.edges}, and a value between two edges in mean, "
                "low and high, or in mean alone."
            )


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
    def of(cls, source: "DataSource | str") -> "DataSource":
        return source if isinstance(source, cls) else cls(str(source))

    @property
    def description(self) -> str:
        name = f"{self.name}; {self.sizes}" if self.sizes else self.name
        return ", ".join([name, *([f"split {self.split}"] if self.split else []), *filter(None, [self.selection])])


@dataclass(frozen=True)
class DataRecord:
    """The texts read: their source, the SHA-256 of the token ids, and the name of one token ("byte")."""

    source: DataSource = DataSource("")
    digest: str = ""
    token_unit: str = "token"

    @property
    def description(self) -> str:
        return self.source.description


NOT_SAID = DataRecord()


@dataclass(frozen=True)
class ForgettingRule:
    """Forgetting at inference, as in `models.scan_forgetting.Forgetting`; the defaults mean none."""

    retention: float | tuple[float, ...] = 1.0
    insertion: float | tuple[float, ...] = 1.0
    window: int | None = None
    delta_scale: float | tuple[float, ...] = 1.0
    decay_scale: float | tuple[float, ...] = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """Base of the results of one model.

    Attributes:
        model, weights: Its name, and the SHA-256 of its parameters.
        data: What was read, its digest and the name of a token.
        device, versions, command, seed, wall_seconds: How it was measured.
        forgetting, attention_window: Those in its config; None for full attention.
    """

    model: str
    weights: str
    data: DataRecord
    device: str
    versions: dict[str, str]
    command: str
    seed: int
    wall_seconds: float
    forgetting: ForgettingRule = ForgettingRule()
    attention_window: int | None = None


class PartResult(AnyDocument):
    """Base of the results of a diagnosis part: a document about one model, which does not name model and data."""

    left_out: tuple[str, ...] = ()
    """What could not be measured, and why, in sentences."""

    def bins(self) -> Iterable[tuple[str, int, int, Estimate]]:
        """Names of metrics and their values by range of positions [start, stop), for tables; by default none."""
        return ()


@dataclass(frozen=True)
class TrainingRecord:
    """How a model was trained: titles of the methods, steps, wall-clock seconds, mean training loss, and settings.

    `state_drop_probability` is None for methods without it, `learning_rate` if unknown.
    """

    methods: tuple[str, ...]
    steps: int
    seconds: float
    loss: float | None
    learning_rate: float | None = None
    state_drop_probability: float | None = None


Role = Literal["base", "intervention", "control", "other"]
"""base: before the intervention; intervention: after it; control: after as many plain steps."""
StoredRole = Annotated[Role, BeforeValidator(lambda role: "intervention" if role == "cured" else role)]
"""A role in a file: older ones say "cured"."""


def check_comparison(results: Sequence[Any], *same: str) -> None:
    """Refuse no models, models of one name, and those that differ in one of these fields ("data.digest")."""
    names = [result.model for result in results]
    wrong = [
        field for field in same if any(attrgetter(field)(one) != attrgetter(field)(results[0]) for one in results)
    ]
    if not names or len(set(names)) < len(names) or wrong:
        raise ValueError(
            f"A comparison needs at least one model, and models with different labels, got {names}, and the same "
            f"{' and '.join(wrong or same).replace('.', ' ')}."
        )
