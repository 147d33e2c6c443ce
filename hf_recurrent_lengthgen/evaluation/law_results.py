"""How thresholds of length depend on the state size, as typed values with a strict JSON form.

"Stuffed Mamba" (arXiv:2410.07145), sections 4 and 5. State sizes are in elements and lengths in tokens; only the
coefficients of a law are in units of its own, in the paper millions of elements and thousands of tokens.
"""

from dataclasses import dataclass
from typing import Literal

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import Estimate

Quantity = Literal["forget", "recall"]
Relation = Literal["=", "<=", "<", ">=", ">"]


@dataclass(frozen=True)
class Threshold:
    """T_forget or T_recall of one state size, or what is known of it.

    Attributes:
        size: N_S, state elements.
        relation: What stands between the threshold and `length`; all but "=" are bounds, where the lengths tried did
            not reach far enough.
        length: Tokens.
        tried: The training lengths of the models behind it, in tokens, ascending.
    """

    size: int
    relation: Relation
    length: int
    tried: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.size < 1 or self.length < 1:
            raise ValueError(f"A threshold needs a state and a length from 1 on, got {self.size} and {self.length}.")
        if not self.tried or list(self.tried) != sorted(set(self.tried)):
            raise ValueError(f"A threshold needs different training lengths in ascending order, got {self.tried}.")


@dataclass(frozen=True)
class LawLine:
    """The law at some state sizes, in tokens; pointwise bounds, None without any degree of freedom."""

    sizes: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None


@dataclass(frozen=True)
class LawFit:
    """A law fitted by least squares.

    Attributes:
        form: "linear": T = a N + b; "exponential": T = a (c^N - 1) + b.
        size_unit: Elements in the unit of N.
        length_unit: Tokens in the unit of T.
        coefficients: a, b or a, c, b with intervals, whose bounds are None without any degree of freedom.
        r_squared: 1 - (sum of squared residuals) / (sum of squared deviations from the mean).
        points: How many were fitted.
        confidence: Two-sided, of all intervals.
        line: The law from the smallest to the largest size.
    """

    form: Literal["linear", "exponential"]
    size_unit: int
    length_unit: int
    coefficients: dict[str, Estimate]
    r_squared: float
    points: int
    confidence: float
    line: LawLine


@document("law")
@dataclass(frozen=True)
class Law:
    """Thresholds of a family of models, and the law through those that are known exactly.

    Attributes:
        quantity: "forget" for the least training length from which on models do not fail beyond it, "recall" for the
            greatest length with accurate recall.
        rule: How the thresholds were found, in words.
        thresholds: One of each state size, or of each size and seed.
        fit: None if there is no fit.
        why_no_fit: The reason; None with a fit.
    """

    quantity: Quantity
    rule: str
    thresholds: tuple[Threshold, ...]
    fit: LawFit | None
    why_no_fit: str | None

    def __post_init__(self) -> None:
        if not self.thresholds:
            raise ValueError("A law needs at least one threshold, got none.")
        if (self.fit is None) == (self.why_no_fit is None):
            raise ValueError("A law has either a fit or a reason for none.")
