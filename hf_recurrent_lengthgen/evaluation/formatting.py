"""Numbers of results in text and HTML."""

from hf_recurrent_lengthgen.evaluation.results import Estimate


def sentence(words: str) -> str:
    """ "Base fails." from "base fails"."""
    return f"{words[0].upper()}{words[1:]}."


def interval_text(estimate: Estimate, sign: bool = False, bounds: str = " ({} to {})") -> str:
    """ "1.363 (1.301 to 1.425)", or only the mean if there is no interval."""
    form = "+.3f" if sign else ".3f"
    text = number_text(estimate.mean, form)
    if estimate.low is None or estimate.high is None:
        return text
    return text + bounds.format(number_text(estimate.low, form), number_text(estimate.high, form))


def range_text(positions: tuple[int, int]) -> str:
    return f"positions {positions[0]:,} to {positions[1]:,}"


def number_text(value: float, form: str) -> str:
    sign, digits = ("+", form[1:]) if form.startswith("+") else ("", form)
    return format(value, f"{sign}z{digits}").replace("-", "\N{MINUS SIGN}")


def cell(estimate: Estimate, sign: bool = False) -> str:
    """HTML of an estimate with its interval below."""
    mean, _, interval = interval_text(estimate, sign).partition(" (")
    return f"<b>{mean}</b>" + (f"<small>{interval.rstrip(')')}</small>" if interval else "")


def tokens(value: int | None, absent: str) -> str:
    """ "1,024", or `absent` for None."""
    return absent if value is None else f"{value:,}"
