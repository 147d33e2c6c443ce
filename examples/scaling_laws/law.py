"""The law of a family of models as a result with a JSON form, and its fit.

"Stuffed Mamba" (arXiv:2410.07145), sections 4 and 5. State sizes are in elements and lengths in tokens; only the
coefficients of a law are in units of its own, in the paper millions of elements and thousands of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scaling_laws import MILLION, THOUSAND, LawFit, NoFitError, Threshold, fit_exponential_law, fit_linear_law

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE

Quantity = Literal["forget", "recall"]


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


def fit_law(
    quantity: Quantity,
    thresholds: Sequence[Threshold],
    rule: str,
    confidence: float = CONFIDENCE,
    size_unit: int = MILLION,
    length_unit: int = THOUSAND,
) -> Law:
    """The paper's law for the thresholds: linear for T_forget (5.2), exponential for T_recall (5.3).

    Only thresholds that are known exactly enter. Bounds are kept in the result; leaving them out bends a law toward
    the lengths that were tried, so try longer and shorter ones rather than trust a fit with many of them. If there is
    no fit, the result says why.

    Args:
        quantity: "forget" or "recall".
        thresholds: Of one family, of different sizes; several of one size, say of seeds, are a point each.
        rule: How they were found, in words, for readers of the result.
        confidence: Two-sided, of all intervals.
        size_unit: Elements in the unit of N in the law's formula.
        length_unit: Tokens in the unit of T.

    Raises:
        ValueError: for no thresholds, and a confidence or units that are not possible.
    """
    known = [threshold for threshold in thresholds if threshold.relation == "="]
    fit = fit_linear_law if quantity == "forget" else fit_exponential_law
    points = [threshold.size for threshold in known], [threshold.length for threshold in known]
    try:
        fitted = fit(*points, confidence, size_unit, length_unit)
    except NoFitError as error:
        return Law(quantity, rule, tuple(thresholds), None, str(error))
    return Law(quantity, rule, tuple(thresholds), fitted, None)
