"""Markdown from values: names and descriptions are shown literally."""

import re
from collections.abc import Sequence

_SPECIAL = re.compile(
    r"[\\`*{}\[\]<>|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|(?<=\w)://|^[-=+#]|^\d+(?=[.)](?:\s|$))"
)


def escape(text: str) -> str:
    """Text on one line, escaped so that nothing in it is Markdown, HTML or mathematics."""
    return _SPECIAL.sub(_escaped, " ".join(text.split()))


def _escaped(match: re.Match[str]) -> str:
    special = match[0]
    if special == "://":  # prevents an automatic link
        return "&#58;//"
    return f"{special[:-1]}&#{ord(special[-1])};" if special[-1].isdecimal() else f"\\{special}"


def table(rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table whose first row is its header.

    Args:
        rows: Cells in Markdown, the same number in each row.
        numbers: Whether the columns after the first hold numbers, which are aligned right.
    """
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    marks = ["---", *["---:" if numbers else "---"] * (len(rows[0]) - 1)]
    return "\n".join([head, f"| {' | '.join(marks)} |", *body])
