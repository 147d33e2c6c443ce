"""A comparison as files (JSON, figures, page) and as a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape, table
from hf_recurrent_lengthgen.cli.parsing import in_columns
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.context_harm.summary import findings
from hf_recurrent_lengthgen.metrics.diagnosis.page import diagnosis_figures, diagnosis_page
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.models.state_on_disk import write_text
from hf_recurrent_lengthgen.plotting.html import plain_table
from hf_recurrent_lengthgen.plotting.images import save_png, save_svg

LOADING = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r})

read = model(**tokenizer("import os\\nimport", add_special_tokens=False, return_tensors="pt"))
state = read.final_state  # all it remembers: a tuple of tensors
prompt = tokenizer(" sys", add_special_tokens=False, return_tensors="pt")
text = model.generate(**prompt, initial_state=state, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(text[0]))"""


def write_report(comparison: Comparison, folder: Path, checkpoint: Path | None = None, further: str = "") -> Path:
    """Write `result.json`, the figures as PNG and SVG, `index.html`, which shows how to load `checkpoint`, and
    `tables.md`.

    The page shows `further`, HTML, after its own figures. Returns the path of the page.
    """
    write_result(folder / "result.json", comparison)
    shown = tables(comparison)
    named = [[(escape(name), *cells) for name, *cells in rows] for rows, _ in shown]
    write_text(folder / "tables.md", "\n".join(f"{table(rows)}\n" for rows in named))
    if comparison.differences:
        further = f"<h2>Differences</h2>{plain_table(*shown[1])}{further}"
    loading = None if checkpoint is None else LOADING.format(folder=str(checkpoint))
    models = tuple(DiagnosedModel(model.role, model.evaluation, {}, {}) for model in comparison.models)
    return write_figures(Diagnosis(comparison.title, models), folder, loading, further)


def write_figures(diagnosis: Diagnosis, folder: Path, loading: str | None = None, further: str = "") -> Path:
    """Write the figures of a diagnosis as PNG and SVG, and the page that shows them, `index.html`, its path."""
    figures = diagnosis_figures(diagnosis)
    for name, figure in figures.items():
        draw(figure, folder / name)
    page = folder / "index.html"
    write_text(page, diagnosis_page(diagnosis, loading, further, figures))
    return page


def draw(figure: Figure, path: Path) -> None:
    save_png(figure, path.with_name(f"{path.name}.png"))
    save_svg(figure, path.with_name(f"{path.name}.svg"))


def summary(comparison: Comparison) -> str:
    """The data and the verdict of each model, then the tables in columns, each with what its numbers are."""
    data = f"Data: {comparison.models[0].evaluation.data.description}"
    lines = "\n".join([data, *(finding.headline for finding in findings(comparison))])
    return "\n\n".join([lines, *(f"{in_columns(rows)}\n{note}" for rows, note in tables(comparison))])


def tables(comparison: Comparison) -> list[tuple[list[Sequence[str]], str]]:
    """Rows, the first of which is the header, and a note: the models, and if there are several, their differences."""
    first = comparison.models[0].evaluation
    start, stop = first.harm.last_range
    place, confidence = f"at {start:,}-{stop:,}", f"{first.confidence:.0%}"
    above = f"excess loss > {first.harm.threshold:g} from"
    rows: list[Sequence[str]] = [("model", f"excess loss {place}", "loss within T", "context use", above)]
    for evaluation in (model.evaluation for model in comparison.models):
        harm, within = estimate_text(evaluation.harm.last, "+"), evaluation.in_window
        use = estimate_text(within.context_use, "+")
        rows.append((evaluation.model, harm, estimate_text(within.loss), use, evaluation.harm.onset))
    many = first.harm.curves.coarse.low is not None
    note = (
        f"nats per {first.data.token_unit}"
        + f" with {confidence} intervals over {first.sequences} sequences" * many
        + "; excess loss above zero: the context beyond the training length makes predictions worse; context use "
        "above zero: the context within T improves them."
    )
    if not comparison.differences:
        return [(rows, note)]
    minus: list[Sequence[str]] = [("difference", f"excess loss {place}", f"loss {place}", "loss within T", "over")]
    for each in comparison.differences:
        values = (estimate_text(value, "+") for value in (each.harm, each.loss, each.in_window))
        over = "sequences" if each.over == "texts" else each.over
        minus.append((f"{each.model} - {each.minus}", *values, f"{each.count} {over}"))
    paired = f"nats per {first.data.token_unit}, paired, with {confidence} intervals; below zero: the first is lower."
    return [(rows, note), (minus, paired)]


def estimate_text(estimate: Estimate, sign: str = "") -> str:
    """ "+1.363 [1.301, 1.425]", or the mean alone where there is no interval."""
    mean = f"{estimate.mean:{sign}z.3f}"
    return mean if estimate.low is None else f"{mean} [{estimate.low:z.3f}, {estimate.high:z.3f}]"
