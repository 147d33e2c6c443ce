"""Figures as PNG and SVG files, and as SVG inside a page."""

import os
import re
from html import escape
from io import BytesIO, StringIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

PNG_DOTS_PER_INCH = 200


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DOTS_PER_INCH, facecolor="white")
    Path(path).write_bytes(buffer.getvalue())


def save_svg(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as an SVG file on white, with text as text; equal figures give equal files."""
    Path(path).write_text(_svg(figure, "white"), encoding="utf-8")


def inline_svg(figure: Figure, name: str, description: str, colors: dict[str, str]) -> str:
    """A figure as an SVG element for an HTML page.

    Args:
        name: Prefix of the element ids, different for each figure of a page.
        description: Description of the figure for screen readers; plain text.
        colors: Color in the figure (#rrggbb) -> CSS value that replaces it.
    """
    svg = _svg(figure, "none")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    opening, _, rest = svg.partition(">")
    svg = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", opening) + ">" + rest
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub("|".join(colors), lambda match: colors[match[0]], svg) if colors else svg
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def _svg(figure: Figure, background: str) -> str:
    buffer = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_recurrent_lengthgen"}):
        figure.savefig(buffer, format="svg", facecolor=background, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
