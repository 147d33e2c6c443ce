"""Markdown from values: whatever a name or a description holds, it is shown as it is."""

import re
from collections.abc import Sequence

_SPECIAL = re.compile(
    r"[\\`*{}\[\]<>|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|(?<=\w)://|^[-=+#]|^\d+(?=[.)](?:\s|$))",
)


def escape(text: str) -> str:
    """Text on one line in which nothing is Markdown, HTML or mathematics."""
    return _SPECIAL.sub(_escaped, " ".join(text.split()))


def _escaped(match: re.Match[str]) -> str:
    found = match[0]
    if found == "://":  # no link of itself
        return "&#58;//"
    return f"{found[:-1]}&#{ord(found[-1])};" if found[-1].isdecimal() else f"\\{found}"


def code(text: str) -> str:
    """Text as code on one line, also inside a table."""
    line = " ".join(text.split()).replace("|", "\N{BROKEN BAR}")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}" if line else ""


def fence(text: str, language: str) -> str:
    """A block of code."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"


def table(rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table whose first row is its head; columns after the first are set to the right if they are numbers.

    Args:
        rows: Cells in Markdown, as many in each row.
        numbers: Whether the other columns hold numbers.
    """
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    marks = ["---", *["---:" if numbers else "---"] * (len(rows[0]) - 1)]
    return "\n".join([head, f"| {' | '.join(marks)} |", *body])


def link(text: str, address: str) -> str:
    """A link; `text` is Markdown, the address has been checked or is ours."""
    return f"[{text}]({address})"
