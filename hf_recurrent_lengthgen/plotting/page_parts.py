"""Shared parts of the HTML pages: a self-contained shell, cards, figures, tables of numbers, and provenance.

Arguments are plain text, which is escaped here, unless they are named HTML. Colors are CSS values.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Generic, NamedTuple, Protocol, TypeVar

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.results import Comparison, Estimate, EvaluationResult
from hf_recurrent_lengthgen.plotting.findings import Finding, interval_text, range_text
from hf_recurrent_lengthgen.plotting.images import inline_svg
from hf_recurrent_lengthgen.plotting.style import DARK, model_colors


class Evaluated(Protocol):
    """A model with its evaluation."""

    @property
    def evaluation(self) -> EvaluationResult: ...


Shown = TypeVar("Shown", bound=Evaluated)

INSIDE = "Inside the training length"
"""Heading for the measurements there, of evaluations and parts of diagnoses."""
STATUS_MARKS = {"breaks": "✕", "holds": "✓", "unclear": "?"}

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
.figures{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,340px),1fr));margin-top:28px}
.pair{display:grid;gap:16px 32px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,440px),1fr));margin-top:12px}
.pair p{max-width:75ch;margin:0 0 8px;font-size:.95rem}
.pair h3{font-size:1rem;margin:0 0 2px}
.pair>div>div{margin-bottom:16px}
details{margin-top:16px}
summary{cursor:pointer;color:var(--muted)}
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


class Row(NamedTuple, Generic[Shown]):
    """A row of a table with one column per model: name, remark, and HTML for a model."""

    name: str
    note: str
    html: Callable[[Shown], str]


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


def page_colors(comparison: Comparison) -> list[str]:
    return [VARIABLES[color] for color in model_colors(comparison.models)]


def card(finding: Finding, color: str, details: str) -> str:
    evaluation = finding.model.evaluation
    return (
        f'<div class="card" style="border-color:{color}">'
        f'<div class="status"><b style="color:{color}">{STATUS_MARKS[finding.status]}</b> {finding.status}</div>'
        f"<h3>{escape(finding.headline)}</h3>"
        f'<div class="big">{signed(evaluation.harm.last.mean)} '
        f"<small>nats per {escape(evaluation.data.token_unit)} of harm</small></div>"
        f"{details}</div>"
    )


def picture(figure: Figure, name: str, caption: str, description: str) -> str:
    """A figure with its caption; `name` is unique on a page, `description` is for screen readers."""
    svg = inline_svg(figure, name, description, VARIABLES)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def bands_text(evaluation: EvaluationResult) -> str:
    """Explanation of the bands in figures; empty for a single sequence."""
    many = evaluation.sequences > 1
    return f" Bands: {evaluation.confidence:.0%} intervals over {evaluation.sequences} sequences." if many else ""


def table(models: Sequence[Shown], colors: Sequence[str], rows: Sequence[Row[Shown]]) -> str:
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


def evaluation_rows(models: Sequence[Shown]) -> list[Row[Shown]]:
    """The numbers of evaluations; the remarks are those of the first one."""
    first = models[0].evaluation
    unit, tolerance = first.data.token_unit, f"{first.verdict.tolerance:.0%}"
    early, late = first.in_window.early_band, first.in_window.late_band
    return [
        Row("Training length", "tokens", lambda model: f"{model.evaluation.training_length:,}"),
        Row(
            "Context harm",
            f"{range_text(first.harm.last_range)}, nats per {unit}",
            lambda model: cell(model.evaluation.harm.last, sign=True),
        ),
        Row(
            f"Harm above {first.harm.threshold:g} from",
            "first bin whose interval is above it, tokens",
            lambda model: tokens(model.evaluation.harm.harmful_from, "nowhere"),
        ),
        Row(
            "In-window loss",
            f"positions inside the training length, nats per {unit}",
            lambda model: cell(model.evaluation.in_window.loss),
        ),
        Row(
            "Context use",
            f"loss at {range_text(early)} minus at {range_text(late)}",
            lambda model: cell(model.evaluation.in_window.context_use, sign=True),
        ),
        Row(
            "Definition 3.2 holds to",
            f"raw loss by position, {tolerance} tolerance, tokens; also depends on how hard the texts get",
            lambda model: f"{model.evaluation.verdict.holds_to:,}",
        ),
        Row(
            "Definition 3.2 fails from",
            "same, with intervals, tokens",
            lambda model: tokens(model.evaluation.verdict.violated_from, "none"),
        ),
    ]


def cell(estimate: Estimate, sign: bool = False) -> str:
    """HTML of an estimate with its interval below."""
    mean, _, interval = interval_text(estimate, sign).partition(" (")
    return f"<b>{mean}</b>" + (f"<small>{interval.rstrip(')')}</small>" if interval else "")


def signed(value: float) -> str:
    return f"{value:+z.2f}".replace("-", "\N{MINUS SIGN}")


def tokens(value: int | None, absent: str) -> str:
    """ "1,024", or `absent` for None."""
    return absent if value is None else f"{value:,}"


def definitions(evaluation: EvaluationResult) -> str:
    start, stop = evaluation.verdict.best_bin
    return (
        f"Intervals are {evaluation.confidence:.0%} t-intervals over {evaluation.sequences} sequences, paired for "
        "harm, context use and failure. A model breaks if the interval of its harm is above "
        f"{evaluation.harm.threshold:g}, holds if it is at or below, and is on the border otherwise. "
        "Definition 3.2 is from Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), applied to logarithmic position bins: "
        f"after the best bin inside the training length (for {evaluation.model}: positions {start:,} to {stop:,}), "
        "perplexity must not rise by more than the tolerance. It cannot distinguish a model that gets worse from "
        "texts that get harder, so with few texts harm is more informative."
    )


def provenance(evaluations: Sequence[EvaluationResult], given: Sequence[str] | None = None) -> str:
    """How the evaluations were made; `given` are the full names of the models if the page shortens them."""
    first = evaluations[0]
    seconds = sum(evaluation.wall_seconds for evaluation in evaluations)
    renamed = [
        f"{evaluation.model}: {name}"
        for evaluation, name in zip(evaluations, given or [], strict=given is not None)
        if evaluation.model != name
    ]
    entries = [
        *([("Models", "; ".join(renamed))] if renamed else []),
        ("Command", _each(evaluations, lambda found: found.command)),
        ("Seed", _each(evaluations, lambda found: str(found.seed))),
        ("Data", f"{first.data.description}; {first.sequences} sequences of {first.evaluated_length:,} tokens"),
        ("SHA-256 of the token ids", first.data.digest),
        ("SHA-256 of the weights", _each(evaluations, lambda found: found.weights)),
        (
            "Versions",
            _each(evaluations, lambda found: ", ".join(f"{k} {v}" for k, v in found.versions.items())),
        ),
        ("Device", _each(evaluations, lambda found: found.device)),
        ("Evaluation time", f"{seconds:,.0f} s for {len(evaluations)} model{'s' * (len(evaluations) > 1)}"),
    ]
    return entry_list(entries)


def entry_list(entries: Sequence[tuple[str, str]]) -> str:
    """A list of names and values as HTML; empty without entries."""
    if not entries:
        return ""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in entries)}</dl>"


def _each(evaluations: Sequence[EvaluationResult], read: Callable[[EvaluationResult], str]) -> str:
    values = {evaluation.model: read(evaluation) for evaluation in evaluations}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{label}: {value}" for label, value in values.items())
