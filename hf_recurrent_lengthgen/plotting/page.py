"""One self-contained HTML page of a comparison: the finding in one look, figures, numbers, and how they were made."""

from collections.abc import Callable
from html import escape

from hf_recurrent_lengthgen.evaluation.results import ComparedModel, Comparison, Estimate
from hf_recurrent_lengthgen.plotting.figures import context_harm_figure, in_window_figure, position_wise_figure
from hf_recurrent_lengthgen.plotting.findings import findings, interval_text, range_text, summary
from hf_recurrent_lengthgen.plotting.images import inline_svg
from hf_recurrent_lengthgen.plotting.style import DARK, model_colors

STATUS_MARKS = {"breaks": "✕ breaks", "holds": "✓ holds", "unclear": "? unclear"}

CSS = """
:root{color-scheme:light dark;--ground:#fff;--panel:#f5f6f8;%(light)s}
@media(prefers-color-scheme:dark){:root{--ground:#14171b;--panel:#1d2127;%(dark)s}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.15rem;margin:36px 0 8px}
.lead{font-size:1.1rem;margin:0 0 20px;color:var(--muted)}
.cards{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,300px),1fr))}
.card{background:var(--panel);border-left:5px solid;border-radius:6px;padding:12px 16px}
.card .status{font-weight:700;font-size:.8rem;letter-spacing:.05em;text-transform:uppercase}
.card .big{font-size:1.9rem;font-weight:700;line-height:1.2;color:var(--ink)}
.card .big small{font-size:.85rem;font-weight:400;color:var(--muted)}
.card h3{font-size:1.05rem;margin:2px 0 4px;color:var(--ink)}
.card p{margin:6px 0 0;font-size:.9rem;color:var(--ink)}
.figures{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,340px),1fr));margin-top:28px}
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
@media(max-width:600px){dl{grid-template-columns:1fr}dd{margin-bottom:6px}th,td{padding-right:8px}table{font-size:.84rem}}
"""
COLOR_NAMES = {"#1b1f24": "ink", "#5b636d": "muted", "#d5d9de": "line"}


def comparison_page(comparison: Comparison, loading: str | None = None) -> str:
    """The HTML text of a page that needs nothing but itself, in light and dark, for desktop and phone.

    Args:
        comparison: What was found; every sentence and number on the page comes from it.
        loading: Code that loads the checkpoint, shown as it is; no such section when None.
    """
    models = comparison.models
    # Figures carry the light colors; the page turns them into variables that follow the reader's scheme.
    names = {color: f"--{COLOR_NAMES.get(color, 'c' + color[1:])}" for color in DARK}
    variables = {color: f"var({name})" for color, name in names.items()}
    css = CSS % {
        "light": ";".join(f"{name}:{color}" for color, name in names.items()),
        "dark": ";".join(f"{name}:{DARK[color]}" for color, name in names.items()),
    }
    colors = [variables[color] for color in model_colors(models)]
    figures = (
        (
            "harm",
            context_harm_figure(models),
            "Loss with the whole context minus loss of the same tokens with at most the training length of "
            "context. At zero, extra context does no harm.",
        ),
        (
            "stream",
            position_wise_figure(models),
            "Loss by position in one long stream read from the zero state. Text difficulty varies with position.",
        ),
        (
            "window",
            in_window_figure(models),
            "Loss by position inside the training length, from the zero state. A model that uses its context falls.",
        ),
    )
    confidence = f"{models[0].evaluation.confidence:.0%}"
    sequences = models[0].evaluation.sequences
    bands = f"Bands: {confidence} intervals over {sequences} sequences." if sequences > 1 else ""
    pictures = "".join(
        f"<figure>{inline_svg(figure, name, f'{caption} {summary(comparison)}', variables)}"
        f"<figcaption>{escape(caption)} {escape(bands)}</figcaption></figure>"
        for name, figure, caption in figures
    )
    sections = [
        f"<h1>{escape(comparison.title)}</h1>",
        f'<p class="lead">{escape(summary(comparison))}</p>',
        f'<div class="cards">{_cards(comparison, colors)}</div>',
        f'<div class="figures">{pictures}</div>',
        "<h2>Numbers</h2>",
        f'<div class="scroll">{_table(models, colors)}</div>',
        f'<p class="note">{escape(_definitions(models[0]))}</p>',
        "<h2>How this was made</h2>",
        _provenance(models),
    ]
    if loading is not None:
        sections += ["<h2>Load the checkpoint</h2>", f"<pre>{escape(loading)}</pre>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(comparison.title)}</title><style>{css}</style></head>\n"
        f"<body><main>\n{chr(10).join(sections)}\n</main></body></html>\n"
    )


def _cards(comparison: Comparison, colors: list[str]) -> str:
    cards = []
    for finding, color in zip(findings(comparison), colors, strict=True):
        evaluation = finding.model.evaluation
        cards.append(
            f'<div class="card" style="border-color:{color};color:{color}">'
            f'<div class="status">{STATUS_MARKS[finding.status]}</div>'
            f"<h3>{escape(finding.headline)}</h3>"
            f'<div class="big">{_signed(evaluation.harm.last.mean)} '
            f"<small>nats per {escape(evaluation.data.token_unit)} of harm</small></div>"
            f"<p>{escape(finding.detail)}</p></div>"
        )
    return "".join(cards)


def _table(models: tuple[ComparedModel, ...], colors: list[str]) -> str:
    first = models[0].evaluation
    unit = first.data.token_unit
    early, late = first.in_window.early_band, first.in_window.late_band
    rows: list[tuple[str, str, Callable[[ComparedModel], str]]] = [
        ("Training", "method, steps, time, last loss", _training),
        ("Training length", "tokens", lambda model: f"{model.evaluation.training_length:,}"),
        (
            "Context harm",
            f"{range_text(first.harm.last_range)}, nats per {unit}",
            lambda model: _cell(model.evaluation.harm.last, sign=True),
        ),
        (
            f"Harm above {first.harm.threshold:g} from",
            "first bin whose interval lies above, tokens",
            lambda model: _tokens(model.evaluation.harm.harmful_from, "nowhere"),
        ),
        (
            "In-window loss",
            f"positions inside the training length, nats per {unit}",
            lambda model: _cell(model.evaluation.in_window.loss),
        ),
        (
            "Context use",
            f"loss at {range_text(early)} minus at {range_text(late)}",
            lambda model: _cell(model.evaluation.in_window.context_use, sign=True),
        ),
        (
            "Generalizes to",
            f"means alone, {first.verdict.tolerance:.0%} tolerance, tokens; text difficulty counts, too",
            lambda model: f"{model.evaluation.verdict.holds_to:,}",
        ),
        (
            "Proven failure from",
            "same, with intervals, tokens",
            lambda model: _tokens(model.evaluation.verdict.violated_from, "none"),
        ),
    ]
    head = "".join(
        f'<th scope="col" style="border-color:{color}">{escape(model.evaluation.model)}</th>'
        for model, color in zip(models, colors, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}<small>{escape(note)}</small></th>'
        + "".join(f"<td>{value(model)}</td>" for model in models)
        + "</tr>"
        for name, note, value in rows
    )
    return f'<table><thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(estimate: Estimate, sign: bool = False) -> str:
    mean, _, interval = interval_text(estimate, sign).partition(" (")
    return f"<b>{mean}</b>" + (f"<small>{interval.rstrip(')')}</small>" if interval else "")


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def _tokens(value: int | None, absent: str) -> str:
    return absent if value is None else f"{value:,}"


def _training(model: ComparedModel) -> str:
    training = model.training
    if training is None:
        return "not trained here"
    return (
        f"{escape(training.method)}<small>{training.steps:,} steps, {training.seconds:,.0f} s, "
        f"loss {training.loss:.3f}</small>"
    )


def _definitions(model: ComparedModel) -> str:
    evaluation = model.evaluation
    start, stop = evaluation.verdict.best_bin
    return (
        f"Intervals are {evaluation.confidence:.0%} t-intervals over {evaluation.sequences} sequences, paired for "
        "harm, context use and failure. A model breaks if the interval of its harm lies above "
        f"{evaluation.harm.threshold:g}, holds if it lies at or below, and is on the border otherwise. "
        "“Generalizes to” is Definition 3.2 of “Understanding and Improving Length Generalization in Recurrent "
        "Models” (arXiv:2507.02782) on logarithmic position bins: from the best bin inside the training length (for "
        f"{evaluation.model}: positions {start:,} to {stop:,}) perplexity must not rise by more than the tolerance."
    )


def _provenance(models: tuple[ComparedModel, ...]) -> str:
    first = models[0].evaluation
    seconds = sum(model.evaluation.wall_seconds for model in models)
    entries = [
        ("Command", _each(models, lambda model: model.evaluation.command)),
        ("Seed", _each(models, lambda model: str(model.evaluation.seed))),
        ("Data", f"{first.data.description}; {first.sequences} sequences of {first.evaluated_length:,} tokens"),
        ("SHA-256 of the token ids", first.data.digest),
        (
            "Versions",
            _each(models, lambda model: ", ".join(f"{k} {v}" for k, v in model.evaluation.versions.items())),
        ),
        ("Device", _each(models, lambda model: model.evaluation.device)),
        ("Evaluation time", f"{seconds:,.0f} s for {len(models)} models"),
    ]
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in entries)}</dl>"


def _each(models: tuple[ComparedModel, ...], read: Callable[[ComparedModel], str]) -> str:
    """The value all models share, or each model's own."""
    values = {model.evaluation.model: read(model) for model in models}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{label}: {value}" for label, value in values.items())
