"""Thresholds and laws in words, for tables."""

from collections.abc import Sequence

from law import Law
from scaling_laws import Threshold
from study_pages import markdown


def short(threshold: Threshold) -> str:
    """The length, with a relation if it is a bound."""
    return f"{'' if threshold.relation == '=' else threshold.relation + ' '}{threshold.length:,}"


def formulas(laws: Sequence[Law]) -> str:
    """Coefficients with their intervals, or why there are none."""
    rows = []
    for law in laws:
        if law.fit is None:
            rows.append([f"T_{law.quantity}", law.why_no_fit or "", "", "", ""])
            continue
        values = [
            f"{name} = {e.mean:.3g}" + ("" if e.low is None else f" ({e.low:.3g} to {e.high:.3g})")
            for name, e in law.fit.coefficients.items()
        ]
        form = {"linear": "a N + b", "exponential": "a (c^N - 1) + b"}[law.fit.form]
        rows.append([f"T_{law.quantity}", form, ", ".join(values), f"{law.fit.r_squared:.3f}", str(law.fit.points)])
    return markdown(["law", "form", "coefficients and 95 % intervals", "R²", "points"], rows)
