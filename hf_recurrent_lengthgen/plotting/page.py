"""One self-contained HTML page of a comparison: the findings, figures, numbers, and how they were made."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.results import ComparedModel, Comparison
from hf_recurrent_lengthgen.plotting.figures import context_harm_figure, in_window_figure, position_wise_figure
from hf_recurrent_lengthgen.plotting.findings import findings, summary
from hf_recurrent_lengthgen.plotting.page_parts import (
    Row,
    bands_text,
    card,
    definitions,
    evaluation_rows,
    html_page,
    page_colors,
    picture,
    provenance,
    table,
)


class Picture(NamedTuple):
    """A figure of evaluations: the function that draws it, and its caption."""

    draw: Callable[[Sequence[ComparedModel]], Figure]
    caption: str


PICTURES = {
    "context_harm": Picture(
        context_harm_figure,
        "Loss with the whole context minus loss of the same tokens with at most the training length of context. At "
        "zero, extra context does no harm.",
    ),
    "position_wise": Picture(
        position_wise_figure,
        "Loss by position in one long stream read from the zero state. Text difficulty varies with position.",
    ),
    "in_window": Picture(
        in_window_figure,
        "Loss by position inside the training length, from the zero state. It falls if a model uses its context.",
    ),
}
"""Name of a figure -> the figure."""


def comparison_page(comparison: Comparison, loading: str | None = None) -> str:
    """The HTML text of a self-contained page, in light and dark, for desktop and phone.

    `loading` is code that loads the checkpoint, shown as it is.
    """
    models, colors = comparison.models, page_colors(comparison)
    evaluations = [model.evaluation for model in models]
    found = summary(comparison)
    bands = bands_text(evaluations[0])
    pictures = "".join(
        picture(draw(models), name, caption + bands, f"{caption} {found}")
        for name, (draw, caption) in PICTURES.items()
    )
    cards = "".join(
        card(finding, color, f"<p>{escape(finding.detail)}</p>")
        for finding, color in zip(findings(comparison), colors, strict=True)
    )
    rows = [Row("Training", "method, steps, time, mean loss", _training), *evaluation_rows(models)]
    sections = [
        f"<h1>{escape(comparison.title)}</h1>",
        f'<p class="lead">{escape(found)}</p>',
        f'<div class="cards">{cards}</div>',
        f'<div class="figures">{pictures}</div>',
        "<h2>Numbers</h2>",
        table(models, colors, rows),
        f'<p class="note">{escape(definitions(evaluations[0]))}</p>',
        "<h2>How this was made</h2>",
        provenance(evaluations),
    ]
    if loading is not None:
        sections += ["<h2>Load the checkpoint</h2>", f"<pre>{escape(loading)}</pre>"]
    return html_page(comparison.title, sections)


def _training(model: ComparedModel) -> str:
    training = model.training
    if training is None:
        return "not recorded"
    told = " with ".join(training.methods)
    if training.state_drop_probability is not None:
        told += f", zero state with probability {training.state_drop_probability:g}"
    if training.learning_rate is not None:
        told += f", learning rate {training.learning_rate:g}"
    return (
        f"{escape(told)}<small>{training.steps:,} steps, {training.seconds:,.0f} s, loss {training.loss:.3f}</small>"
    )
