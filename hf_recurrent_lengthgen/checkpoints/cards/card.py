"""Model cards: built from a checkpoint folder and result files, checked, and written beside the weights."""

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.checkpoints.card_mark import CardMark, cards_digest, read_card_mark
from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, Evidence, read_checkpoint, read_evidence
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape
from hf_recurrent_lengthgen.checkpoints.cards.metadata import PACKAGE, card_data
from hf_recurrent_lengthgen.checkpoints.cards.results_section import (
    FIGURES,
    POSITION_WISE,
    RESULTS,
    commands_section,
    comparison_section,
    diagnosis_section,
    figures,
    result_files,
    retrieval_section,
    verdict,
)
from hf_recurrent_lengthgen.checkpoints.cards.sections import (
    citation_section,
    limits_section,
    making_section,
    summary,
    use_section,
)
from hf_recurrent_lengthgen.checkpoints.records import file_digest
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.json_schema import from_plain
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.versions import installed_versions

README = "README.md"
_OURS = re.compile(r"(position_wise|context_harm|retrieval)(-\d+)?\.png|(comparison|diagnosis|retrieval)(-\d+)?\.json")
OWN_WORDS = ("<!-- own words: lengthgen card keeps what stands here -->", "<!-- end of own words -->")
"""Marks around the text that a person writes."""
Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class CardSettings:
    """Facts for a card that are in no file.

    Attributes:
        repo_id: Hub repository, owner/name; None if there is none yet.
        license: License identifier of the Hub; None for the license of the source.
        language: Language of the training text, as on the Hub: "en", "code".
        datasets: Training datasets on the Hub.
        authors: Authors of the checkpoint.
        own_words: Markdown that a person wrote.
    """

    repo_id: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    own_words: str = ""

    def said(self) -> dict[str, Any]:
        """The given options, as a card records them."""
        return {
            field.name: value
            for field in fields(self)
            if field.name != "own_words" and (value := getattr(self, field.name))
        }

    def completed(self, said: dict[str, Any]) -> "CardSettings":
        """These settings, completed with those of an earlier card."""
        return replace(from_plain(said, CardSettings), own_words=self.own_words, **self.said())


class WrittenCard(NamedTuple):
    """Path of a card, what it lacks, and the copy of the README.md that it replaced, if that was not ours."""

    path: Path
    missing: list[str]
    kept: Path | None = None


def build_card(
    folder: str | os.PathLike[str], results: Paths = (), settings: CardSettings = CardSettings()
) -> ModelCard:
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
    settings: CardSettings = CardSettings(),
    overwrite: bool = False,
) -> WrittenCard:
    """Write README.md, figures/ and results/ into a checkpoint folder.

    All files are written in a temporary folder and moved when complete, the README.md last. Text between `OWN_WORDS`
    in an existing README.md stays; other changes to it are overwritten.

    Args:
        folder: The checkpoint.
        results: As in `build_card`; None for those of the existing card.
        settings: As in `build_card`, completed with those of the existing card.
        overwrite: Whether to replace a README.md, figures and results that this function did not write. Such a
            README.md is kept under another name, and only its own words are taken over.

    Raises:
        ValueError: as in `build_card`, for such files without `overwrite`, and for damaged marks of own words.
    """
    path = Path(folder)
    checkpoint, readme = read_checkpoint(path), path / README
    there = readme.read_text(encoding="utf-8", errors="replace") if readme.exists() else ""
    try:
        mark = read_card_mark(there)
    except ValueError:
        mark = None
    foreign = bool(there) and mark is None
    if foreign and not overwrite:
        raise ValueError(
            f"{readme} was not written by lengthgen card: give --overwrite to replace it and keep it as README.old.md."
        )
    old = _written_with(mark)
    if results is None:
        results = [path / name for name in old if name.parts[0] == RESULTS]
    settings = replace(settings, own_words=own_words(there))
    if mark is not None and not overwrite:
        settings = settings.completed(mark.said)
    evidence = read_evidence(checkpoint, results)
    card = render(checkpoint, evidence, settings)
    new = Path(tempfile.mkdtemp(prefix=".card.", suffix=".tmp", dir=path))
    try:
        _write_files(new, card, evidence, checkpoint.files, settings.said())
        if not overwrite:
            _check_free(path, new, old)
        kept = _set_aside(readme) if foreign else None
        _replace(path, new, old)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return WrittenCard(readme, missing(checkpoint, evidence, card), kept)


def render(checkpoint: Checkpoint, evidence: Sequence[Evidence], settings: CardSettings) -> ModelCard:
    """The card of a checkpoint and results that were read."""
    validate_repo_id(settings.repo_id)
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    license = settings.license or (None if source is None else source.license)
    name = (settings.repo_id or checkpoint.name).rpartition("/")[2]
    evaluated = any(item.compared for item in evidence)
    data = card_data(checkpoint, evidence, name, license, settings.language, settings.datasets)
    sections = [
        f"# {escape(name)}",
        *([f"By {escape(', '.join(settings.authors))}."] if settings.authors else []),
        summary(checkpoint),
        *([verdict(evidence, checkpoint.vocab_size), POSITION_WISE] if evaluated else []),
        "\n\n".join(filter(None, (OWN_WORDS[0], settings.own_words, OWN_WORDS[1]))),
        "## Use",
        use_section(checkpoint, settings.repo_id or checkpoint.name, settings.repo_id is not None),
        *_measured(evidence),
        "## How it was made",
        making_section(checkpoint, license),
        "## Limits",
        limits_section(checkpoint, evidence, license),
        "## Citation",
        citation_section(checkpoint, _version(checkpoint)),
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def _measured(evidence: Sequence[Evidence]) -> list[str]:
    """The section with all numbers."""
    images, names = list(figures(evidence)), result_files(evidence)
    if not evidence:
        return []
    parts = ["## Results"]
    for item, name in zip(evidence, names, strict=True):
        used, images = images[: (here := len(figures([item])))], images[here:]
        section = comparison_section if item.compared else retrieval_section if item.retrieved else diagnosis_section
        parts.append(section(item, name, used))
    return [*parts, "### Commands to measure again", commands_section(evidence)]


def _write_files(
    folder: Path, card: ModelCard, evidence: Sequence[Evidence], files: dict[str, str], said: dict[str, Any]
) -> None:
    for kind in (FIGURES, RESULTS):
        (folder / kind).mkdir()
    for name, make in figures(evidence).items():
        save_png(make(), folder / FIGURES / name)
    for name, item in zip(result_files(evidence), evidence, strict=True):
        write_result(folder / RESULTS / name, item.original)
    wrote = tuple(name.as_posix() for name in _files_in(folder))
    (folder / README).write_text(marked(str(card), files, wrote, said), encoding="utf-8")


def _files_in(folder: Path) -> list[Path]:
    return sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())


def marked(text: str, files: dict[str, str], wrote: Sequence[str], said: dict[str, Any] | None = None) -> str:
    """A card with the comment that identifies it; the arguments are those of `CardMark`."""
    return f"{text.rstrip(chr(10))}\n\n{CardMark(cards_digest(files), tuple(wrote), said or {}).comment()}\n"


def own_words(text: str) -> str:
    """The text between the marks of a card; a `ValueError` unless each mark occurs once, in order."""
    counts = [text.count(mark) for mark in OWN_WORDS]
    if counts == [0, 0]:
        return ""
    if counts != [1, 1] or text.index(OWN_WORDS[0]) > text.index(OWN_WORDS[1]):
        raise ValueError(
            f"README.md must have its own words between {' and '.join(OWN_WORDS)}, with each mark once: restore them."
        )
    return text.partition(OWN_WORDS[0])[2].partition(OWN_WORDS[1])[0].strip()


def _set_aside(readme: Path) -> Path:
    """Copy a README.md to an unused name."""
    numbers = itertools.chain([""], itertools.count(2))
    free = next(name for number in numbers if not (name := readme.with_name(f"README.old{number}.md")).exists())
    shutil.copyfile(readme, free)
    return free


def _written_with(mark: CardMark | None) -> list[Path]:
    """Paths in the folder of the figures and results that were written with a card."""
    names = [] if mark is None else [Path(name) for name in mark.wrote]
    return [name for name in names if _OURS.fullmatch(name.name) and str(name.parent) in (FIGURES, RESULTS)]


def _check_free(folder: Path, new: Path, old: Sequence[Path]) -> None:
    """Refuse to write over a file that belongs to no card."""
    taken = [
        str(folder / name)
        for name in _files_in(new)
        if name not in (Path(README), *old)
        and (folder / name).exists()
        and file_digest(folder / name) != file_digest(new / name)
    ]
    if taken:
        raise ValueError(
            f"These files were not written by lengthgen card: {', '.join(taken)}. Move those that you need out of "
            f"{FIGURES}/ and {RESULTS}/, and give --overwrite."
        )


def _replace(folder: Path, new: Path, old: Sequence[Path]) -> None:
    """Move a finished card over the old one, and remove the files of the old one."""
    written = _files_in(new)
    for kind in (FIGURES, RESULTS):
        (folder / kind).mkdir(exist_ok=True)
    for file in sorted(written, key=lambda file: file == Path(README)):
        os.replace(new / file, folder / file)
    for file in old:
        if file not in written:
            (folder / file).unlink(missing_ok=True)
    for kind in (FIGURES, RESULTS):
        if not any((folder / kind).iterdir()):
            (folder / kind).rmdir()


def missing(checkpoint: Checkpoint, evidence: Sequence[Evidence], card: ModelCard) -> list[str]:
    """What a card lacks, and how to provide it."""
    told = {
        "results on long texts (lengthgen evaluate, --results)": any(item.compared for item in evidence),
        "results on retrieval (lengthgen retrieve, --results)": any(item.retrieved for item in evidence),
        "a license (--license)": card.data.get("license"),
        "the language of its training text (--language)": card.data.get("language"),
        "the training data on the Hub (--datasets)": card.data.get("datasets"),
        "its lineage (lineage.json)": checkpoint.lineage,
        "a verification of these files (lengthgen verify)": checkpoint.verification,
        "a training length (config.json)": checkpoint.training_length,
        "a tokenizer": checkpoint.tokenizer,
    }
    return [what for what, there in told.items() if not there]


def _version(checkpoint: Checkpoint) -> str:
    """Version of this package when it last changed the checkpoint, else the installed one."""
    made = [step.versions[PACKAGE] for step in checkpoint.steps if PACKAGE in step.versions]
    return made[-1] if made else installed_versions()[PACKAGE]
