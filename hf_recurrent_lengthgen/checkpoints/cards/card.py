"""Model cards: made from a checkpoint folder and result files by the template `card.md.jinja`, beside the weights."""

import json
import os
import shlex
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.card_mark import card_mark, read_card_mark
from hf_recurrent_lengthgen.checkpoints.cards import results as results_of
from hf_recurrent_lengthgen.checkpoints.cards.facts import (
    CardSettings,
    Checkpoint,
    Evidence,
    data_text,
    read_checkpoint,
    read_evidence,
)
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape
from hf_recurrent_lengthgen.checkpoints.cards.metadata import PACKAGE, card_data
from hf_recurrent_lengthgen.checkpoints.cards.trainings import trainings_table
from hf_recurrent_lengthgen.checkpoints.records import Step
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.metrics.context_harm.figure import context_harm_figure, position_wise_figure
from hf_recurrent_lengthgen.metrics.context_harm.page import definitions
from hf_recurrent_lengthgen.models import family_config
from hf_recurrent_lengthgen.models.configuration_stateful import TESTED
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, in_words
from hf_recurrent_lengthgen.models.state_on_disk import write_text
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.versions import installed_versions

logger = logging.get_logger(__name__)
README, FIGURES, RESULTS = "README.md", "figures", "results"
WRITTEN = (
    *("figures/position_wise.png", "figures/context_harm.png"),
    *("results/comparison*.json", "results/diagnosis*.json", "results/retrieval*.json"),
)
"""Patterns of the files that a card brings along."""
NO_SETTINGS = CardSettings()
OWN_WORDS = ("<!-- own words: lengthgen card keeps what stands here -->", "<!-- end of own words -->")
"""Marks around the manual section."""
Paths = Sequence[str | os.PathLike[str]]


def build_card(folder: str | os.PathLike[str], results: Paths = (), settings: CardSettings = NO_SETTINGS) -> ModelCard:
    """The card of a checkpoint; `write_card` writes its figures and copies of results.

    Args:
        folder: The checkpoint.
        results: Result files of `lengthgen evaluate`, `diagnose` and `retrieve`; none for a card without numbers.
        settings: Facts that are in no file.

    Raises:
        ValueError: for an adapter, damaged files, results of other weights, and an invalid `repo_id`.
    """
    checkpoint = read_checkpoint(folder)
    return render(checkpoint, read_evidence(checkpoint, results), settings)


def write_card(
    folder: str | os.PathLike[str],
    results: Paths | None = None,
    settings: CardSettings = NO_SETTINGS,
    overwrite: bool = False,
) -> Path:
    """Write figures/, results/ and, when they are complete, README.md into a checkpoint folder; returns its path.

    Text between `OWN_WORDS` in an existing README.md stays; other changes to it are overwritten.

    Args:
        folder: The checkpoint.
        results: As in `build_card`; None for those in results/, if there is a card.
        settings: As in `build_card`; license, language and datasets are by default those of an existing card.
        overwrite: Whether to replace a README.md that this function did not write, and to forget the settings of an
            existing card.

    Raises:
        ValueError: as in `build_card`, for such a README.md without `overwrite`, and for damaged marks in it.
    """
    path = Path(folder)
    checkpoint, readme = read_checkpoint(path), path / README
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.exists() else ""
    ours = read_card_mark(text) is not None
    if text and not ours and not overwrite:
        raise ValueError(f"{readme} was not written by lengthgen card: give --overwrite to replace it.")
    old = {file for pattern in WRITTEN for file in path.glob(pattern)} if ours else set()
    if results is None:
        results = sorted(file for file in old if file.parent.name == RESULTS)
    settings = replace(settings, own_words=own_words(text))
    if ours and not overwrite:
        data: Any = ModelCard(text).data
        settings = replace(
            settings,
            license=settings.license or data.license,
            language=settings.language or _texts(data.language),
            datasets=settings.datasets or _texts(data.datasets),
        )
    evidence = read_evidence(checkpoint, results)
    card = render(checkpoint, evidence, settings)
    wrote = _write_figures_and_results(path, evidence)
    write_text(readme, marked(str(card), checkpoint.files))
    for file in old - wrote:
        file.unlink()
    return readme


def _texts(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def write_card_of_run(output: str, repo_id: str | None, overwrite: bool) -> bool:
    """Write the card of a training run's folder with a lineage, for `card_writer` of a trainer.

    Args:
        output: The folder.
        repo_id: Its repository on the Hub.
        overwrite: Whether any existing README.md may be replaced.

    Returns:
        Whether it was written; if not, a warning gives the reason.
    """
    try:
        write_card(output, settings=CardSettings(repo_id), overwrite=overwrite)
    except ValueError as error:
        logger.warning(f"{output} gets no card from its lineage: {error}")
        return False
    return True


def figures(evidence: Sequence[Evidence]) -> dict[str, Callable[[], Figure]]:
    """The figures of a card by file name: those of the first evaluation."""
    models = next((item.compared for item in evidence if item.compared), None)
    if models is None:
        return {}
    return {
        "position_wise.png": partial(position_wise_figure, models),
        "context_harm.png": partial(context_harm_figure, models),
    }


def _write_figures_and_results(folder: Path, evidence: Sequence[Evidence]) -> set[Path]:
    drawn = {folder / FIGURES / name: draw for name, draw in figures(evidence).items()}
    results = {folder / RESULTS / item.file: item.original for item in evidence}
    for file in (*drawn, *results):
        file.parent.mkdir(exist_ok=True)
    for file, draw in drawn.items():
        save_png(draw(), file)
    for file, result in results.items():
        write_result(file, result)
    return {*drawn, *results}


def render(checkpoint: Checkpoint, evidence: Sequence[Evidence], settings: CardSettings) -> ModelCard:
    """The card of a checkpoint and results that were read."""
    validate_repo_id(settings.repo_id)
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    settings = replace(settings, license=settings.license or (None if source is None else source.license))
    place = settings.repo_id or checkpoint.name
    data = card_data(checkpoint, evidence, settings, place.rpartition("/")[2])
    env = Environment(
        loader=PackageLoader(__package__, "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {"escape": escape, "quote": json.dumps, "shell": shlex.quote}
    family = family_config(checkpoint.model_type)
    body = env.get_template("card.md.jinja").render(
        checkpoint=checkpoint,
        evidence=evidence,
        settings=settings,
        place=place,
        license=settings.license,
        source=source,
        family=checkpoint.model_type if family is None else family.name_of(checkpoint.config),
        # load_model wraps the stock class of other families
        wrapped=not checkpoint.model_type.startswith("stateful_") and family is None,
        forgets=in_words(checkpoint.forgets) if checkpoint.forgets != Forgetting() else None,
        papers=list(dict.fromkeys(method.paper for method in checkpoint.methods if method.paper)),
        # of the package that changed the checkpoint last
        version=ChainMap(*(step.versions for step in reversed(checkpoint.steps)), installed_versions())[PACKAGE],
        transformers=TESTED,
        package=PACKAGE,
        own_words="\n\n".join(filter(None, (OWN_WORDS[0], settings.own_words, OWN_WORDS[1]))),
        step_in_words=_step_in_words,
        trainings_table=trainings_table,
        data_text=data_text,
        definitions=definitions,
        results=results_of,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def _step_in_words(step: Step) -> str:
    run = step.training
    if run is None:
        return step.description + ("" if step.tokenizer is None else f", with the tokenizer {step.tokenizer}")
    titles = " with ".join(method.title for method in run.methods)
    of = "" if run.adapter is None else " of an adapter"
    large = ((10**9, "billion"), (10**6, "million"))
    number = next((f"{run.tokens / size:.1f} {name}" for size, name in large if run.tokens >= size), f"{run.tokens:,}")
    return f"{titles}{of} ({run.steps:,} steps, {number} tokens)"


def marked(text: str, files: dict[str, str]) -> str:
    """A card with the comment that identifies it."""
    return f"{text.rstrip(chr(10))}\n\n{card_mark(files)}\n"


def own_words(text: str) -> str:
    """The manual section between the marks of a card; a `ValueError` unless each mark occurs once, in order."""
    counts = [text.count(mark) for mark in OWN_WORDS]
    if counts == [0, 0]:
        return ""
    if counts != [1, 1] or text.index(OWN_WORDS[0]) > text.index(OWN_WORDS[1]):
        raise ValueError(
            f"README.md must have its manual section between {' and '.join(OWN_WORDS)}, each once: restore them."
        )
    return text.partition(OWN_WORDS[0])[2].partition(OWN_WORDS[1])[0].strip()
