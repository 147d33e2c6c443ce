"""Parts of HTML pages: a self-contained shell, figures, tables of numbers, and lists.

Arguments are plain text, which is escaped here, unless they are named HTML. Colors are CSS values.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.plotting.images import inline_svg
from hf_recurrent_lengthgen.plotting.style import DARK

CSS = """
:root{color-scheme:light dark;--ground:#fff;--panel:#f5f6f8;%(light)s}
@media(prefers-color-scheme:dark){:root{--ground:#14171b;--panel:#1d2127;%(dark)s}
[id*=QuadMesh],figure image{filter:invert(.92) hue-rotate(180deg)}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
main{max-width:1180px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.15rem;margin:36px 0 8px}
.lead{font-size:1.1rem;margin:0 0 20px;color:var(--muted)}
.lead p{margin:0 0 6px}
.lead b{color:var(--ink)}
.cards{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,300px),1fr))}
.card{background:var(--panel);border-left:5px solid;border-radius:6px;padding:12px 16px;min-width:0}
.card .status{font-weight:700;font-size:.8rem;letter-spacing:.05em;text-transform:uppercase}
.card .status b{font-size:1.1rem;line-height:1}
.card .big{font-size:1.9rem;font-weight:700;line-height:1.2}
.card .big small{font-size:.85rem;font-weight:400;color:var(--muted)}
.card h3{font-size:1.05rem;margin:2px 0 4px}
.card p{margin:6px 0 0;font-size:.9rem}
.card dl{font-size:.9rem;margin-top:10px;border-top:1px solid var(--line);padding-top:8px}
.pair{display:grid;gap:16px 32px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,440px),1fr));margin-top:12px}
.pair p{max-width:75ch;margin:0 0 8px;font-size:.95rem}
.pair h3{font-size:1rem;margin:0 0 2px}
.pair>div>div{margin-bottom:16px}
figure{margin:0;min-width:0}
figure svg{width:100%%;height:auto;display:block}
figcaption{font-size:.85rem;color:var(--muted)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:7px 12px 7px 0;border-bottom:1px solid var(--line)}
th[scope=col]{border-bottom:2px solid}
td small,th small{display:block;color:var(--muted);font-weight:400}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;font-size:.92rem;margin:0}
dt{color:var(--muted)}
dd{margin:0;min-width:0;overflow-wrap:anywhere}
pre{background:var(--panel);border-radius:6px;padding:12px;overflow-x:auto;font-size:.88rem}
.note{font-size:.88rem;color:var(--muted);max-width:75ch}
@media(max-width:600px){.card dl{grid-template-columns:auto 1fr}}
@media(max-width:600px){dl{grid-template-columns:1fr}dd{margin-bottom:6px}th,td{padding-right:8px}table{font-size:.84rem}}
"""
COLOR_NAMES = {"#1b1f24": "ink", "#5b636d": "muted", "#d5d9de": "line"}
# Figures carry the light colors; a page turns them into variables that follow the reader's scheme.
_NAMES = {color: f"--{COLOR_NAMES.get(color, 'c' + color[1:])}" for color in DARK}
VARIABLES = {color: f"var({name})" for color, name in _NAMES.items()}


class Row(NamedTuple):
    """A row of a table with one column per model: name, remark, and HTML for a model."""

    name: str
    note: str
    html: Callable[[Any], str]


def html_page(title: str, sections: Sequence[str]) -> str:
    """The text of a self-contained page, in light and dark, from the HTML of its sections."""
    css = CSS % {
        "light": ";".join(f"{name}:{color}" for color, name in _NAMES.items()),
        "dark": ";".join(f"{name}:{DARK[color]}" for color, name in _NAMES.items()),
    }
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n"
        f"<body><main>\n{chr(10).join(sections)}\n</main></body></html>\n"
    )


def picture(figure: Figure, name: str, caption: str, description: str) -> str:
    """A figure with its caption; `name` is unique on a page, `description` is for screen readers."""
    svg = inline_svg(figure, name, description, VARIABLES)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(models: Sequence[Any], colors: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows with a column for each model, named by its `evaluation`."""
    head = "".join(
        f'<th scope="col" style="border-color:{color}">{escape(model.evaluation.model)}</th>'
        for model, color in zip(models, colors, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row.name)}<small>{escape(row.note)}</small></th>'
        + "".join(f"<td>{row.html(model)}</td>" for model in models)
        + "</tr>"
        for row in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of numbers"><table><thead><tr>'
        f"<td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plain_table(rows: Sequence[Sequence[str]], note: str) -> str:
    """A table of text, whose first row is its header, with a note below."""
    head, *body = rows
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
        f'{names}</tr></thead><tbody>{lines}</tbody></table></div><p class="note">{escape(note)}</p>'
    )


def entry_list(entries: Sequence[tuple[str, str]]) -> str:
    """A list of names and values as HTML; empty without entries."""
    if not entries:
        return ""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in entries)}</dl>"
