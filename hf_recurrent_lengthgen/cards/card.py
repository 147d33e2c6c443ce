"""Model cards: built of what a folder and result files say, checked, and written beside the weights."""

import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.cards.facts import Checkpoint, Evidence, read_checkpoint, read_evidence
from hf_recurrent_lengthgen.cards.licenses import LICENSES, check_license
from hf_recurrent_lengthgen.cards.markdown import escape
from hf_recurrent_lengthgen.cards.metadata import PACKAGE, card_data
from hf_recurrent_lengthgen.cards.results_section import (
    FIGURES,
    RESULTS,
    commands_section,
    comparison_section,
    diagnosis_section,
    figures,
    position_wise_image,
    result_files,
    retrieval_section,
    verdict,
)
from hf_recurrent_lengthgen.cards.sections import (
    citation_section,
    limits_section,
    making_section,
    summary,
    use_section,
)
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.json_schema import from_plain
from hf_recurrent_lengthgen.evaluation.provenance import installed_versions
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.records import CardMark, cards_digest, file_digest, read_card_mark

README = "README.md"
_OURS = re.compile(r"(position_wise|context_harm|retrieval)(-\d+)?\.png|(comparison|diagnosis|retrieval)(-\d+)?\.json")
OWN_WORDS = ("<!-- own words: lengthgen card keeps what stands here -->", "<!-- end of own words -->")
"""Between them, a person writes."""
Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class CardSettings:
    """What no file says.

    Attributes:
        repo_id: Name on the Hub, owner/name; None if it is not there yet.
        license: Identifier of the Hub; None for that of the source.
        language: Of the training text, as the Hub names it: "en", "code".
        datasets: Names on the Hub of the training data.
        authors: Who made it.
        own_words: Markdown that a person wrote.
    """

    repo_id: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    own_words: str = ""

    def said(self) -> dict[str, Any]:
        """The options that were given, as a card records them."""
        return {
            field.name: value
            for field in fields(self)
            if field.name != "own_words" and (value := getattr(self, field.name))
        }

    def completed(self, said: dict[str, Any]) -> "CardSettings":
        """With what was said before, as far as it is not said now."""
        return replace(from_plain(said, CardSettings), own_words=self.own_words, **self.said())


class WrittenCard(NamedTuple):
    """Path of a card, what it lacks, and where the README.md is kept that it replaced, if that was another's."""

    path: Path
    missing: list[str]
    kept: Path | None = None


def build_card(
    folder: str | os.PathLike[str],
    results: Paths = (),
    repo_id: str | None = None,
    *,
    license: str | None = None,
    language: Sequence[str] = (),
    datasets: Sequence[str] = (),
    authors: Sequence[str] = (),
) -> ModelCard:
    """The card of a checkpoint. Its pictures and copies of results are written by `write_card`.

    Args:
        folder: The checkpoint.
        results: Result files of `lengthgen evaluate`, `diagnose` and `retrieve`; none for a card without numbers.
        repo_id, license, language, datasets, authors: See `CardSettings`.

    Raises:
        ValueError: for an adapter, damaged files, results of other weights, and metadata that the Hub would refuse.
    """
    settings = CardSettings(repo_id, license, tuple(language), tuple(datasets), tuple(authors))
    checkpoint = read_checkpoint(folder)
    return render(checkpoint, read_evidence(checkpoint, results), settings)


def write_card(
    folder: str | os.PathLike[str],
    results: Paths | None = None,
    repo_id: str | None = None,
    *,
    license: str | None = None,
    language: Sequence[str] = (),
    datasets: Sequence[str] = (),
    authors: Sequence[str] = (),
    overwrite: bool = False,
) -> WrittenCard:
    """Write README.md, figures/ and results/ into a checkpoint folder.

    All is made beside, and moved when it is complete, the README.md last. What stands between `OWN_WORDS` in the
    README.md that is there stays; what was changed elsewhere in it is written over.

    Args:
        folder: The checkpoint.
        results: As in `build_card`; None for those of the card that is there.
        repo_id, license, language, datasets, authors: See `CardSettings`; by default those of the card that is there.
        overwrite: Whether to replace a README.md, figures and results that this function did not write; such a
            README.md is kept beside, and nothing but own words is taken from it.

    Raises:
        ValueError: as `build_card`, for such files, and for marks of own words that are damaged.
    """
    path = Path(folder)
    checkpoint, there = read_checkpoint(path), _read_text(path / README)
    mark = read_card_mark(there)
    foreign = bool(there) and mark is None
    if foreign and not overwrite:
        raise ValueError(
            f"{path / README} was not written by lengthgen card: give --overwrite to replace it, which keeps it as "
            "README.old.md."
        )
    old = _written_with(mark)
    if results is None:
        results = [path / name for name in old if name.parts[0] == RESULTS]
    settings = CardSettings(repo_id, license, tuple(language), tuple(datasets), tuple(authors), own_words(there))
    if mark is not None and not overwrite:
        settings = settings.completed(mark.said)
    evidence = read_evidence(checkpoint, results)
    card = render(checkpoint, evidence, settings)
    new = Path(tempfile.mkdtemp(prefix=".card.", suffix=".tmp", dir=path))
    try:
        write_files(new, card, evidence, checkpoint.files, settings.said())
        if not overwrite:
            _check_free(path, new, old)
        kept = _set_aside(path / README) if foreign else None
        _replace(path, new, old)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return WrittenCard(path / README, missing(checkpoint, evidence, card), kept)


def render(checkpoint: Checkpoint, evidence: Sequence[Evidence], settings: CardSettings) -> ModelCard:
    """The card of what was read."""
    if settings.repo_id is not None:
        _check_name(settings.repo_id)
    if settings.license is not None:
        check_license(settings.license)
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    license = settings.license or (None if source is None else source.license)
    name = (settings.repo_id or checkpoint.name).rpartition("/")[2]
    data = card_data(checkpoint, evidence, name, license, settings.language, settings.datasets)
    sections = [
        f"# {escape(name)}",
        *([f"By {escape(', '.join(settings.authors))}."] if settings.authors else []),
        summary(checkpoint),
        *_told_first(evidence, checkpoint.vocab_size),
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
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
    check_card(card)
    return card


def _told_first(evidence: Sequence[Evidence], vocab_size: int | None) -> list[str]:
    """The verdict and the main figure, for the top of a card."""
    if not any(item.compared for item in evidence):
        return []
    return [verdict(evidence, vocab_size), position_wise_image("position_wise.png")]


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
    return [*parts, "### To measure again", commands_section(evidence)]


def write_files(
    folder: Path, card: ModelCard, evidence: Sequence[Evidence], files: dict[str, str], said: dict[str, Any]
) -> None:
    """Write a card with its figures and results into a folder; `files` and `said` as in `marked`."""
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
    """A card with the comment by which it is known.

    Args:
        text: The card.
        files: SHA-256 by name of the weights and config that it tells of.
        wrote: Names of the figures and results that belong to it.
        said: `CardSettings.said`.
    """
    return f"{text.rstrip(chr(10))}\n\n{CardMark(cards_digest(files), tuple(wrote), said or {}).comment()}\n"


def own_words(text: str) -> str:
    """What a person wrote between the marks of a card; "" if nothing.

    Raises:
        ValueError: for a mark without the other, and if one is there twice.
    """
    counts = [text.count(mark) for mark in OWN_WORDS]
    if counts == [0, 0]:
        return ""
    if counts != [1, 1] or text.index(OWN_WORDS[0]) > text.index(OWN_WORDS[1]):
        raise ValueError(f"The own words of README.md must stand between {' and '.join(OWN_WORDS)}, each once.")
    return text.partition(OWN_WORDS[0])[2].partition(OWN_WORDS[1])[0].strip()


def _read_text(readme: Path) -> str:
    return readme.read_text(encoding="utf-8", errors="replace") if readme.exists() else ""


def _set_aside(readme: Path) -> Path:
    """Copy a README.md to a name that is free."""
    numbers = itertools.chain([""], itertools.count(2))
    free = next(name for number in numbers if not (name := readme.with_name(f"README.old{number}.md")).exists())
    shutil.copyfile(readme, free)
    return free


def _written_with(mark: CardMark | None) -> list[Path]:
    """The figures and results that were written with a card, by name in the folder."""
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
            f"Not written by lengthgen card: {', '.join(taken)}. Move what you need of it out of {FIGURES}/ and "
            f"{RESULTS}/, and give --overwrite."
        )


def _replace(folder: Path, new: Path, old: Sequence[Path]) -> None:
    """Move a finished card over the old one, and remove what was written with that."""
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
    """What a card lacks, and how it is given."""
    told = {
        "results on long texts (lengthgen evaluate, --results)": any(item.compared for item in evidence),
        "results on retrieval (lengthgen retrieve, --results)": any(item.retrieved for item in evidence),
        "a licence (--license)": card.data.get("license"),
        "the language of its training text (--language)": card.data.get("language"),
        "the training data on the Hub (--datasets)": card.data.get("datasets"),
        "its lineage (lineage.json)": checkpoint.lineage,
        "a verification of these files (lengthgen verify)": checkpoint.verification,
        "a training length (config.json)": checkpoint.training_length,
        "a tokenizer": checkpoint.tokenizer,
    }
    return [what for what, there in told.items() if not there]


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ValueError(f"given twice: {sorted({key for key in keys if keys.count(key) > 1})}")
        return super().construct_mapping(node, deep)


def check_card(card: ModelCard) -> None:
    """Check what the Hub checks of a card, as far as that is possible without it.

    Raises:
        ValueError: with all that is wrong.
    """
    problems = []
    text = str(card)
    block = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    try:
        values = yaml.load(block[1], _UniqueKeys) if block else None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"The metadata of the card is not valid YAML: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError("The card has no metadata.")
    again = ModelCard(text).data.to_dict()
    if again != card.data.to_dict():
        problems.append("the metadata changes when it is read back")
    for name in _listed(values.get("base_model")) + _listed(values.get("datasets")):
        try:
            _check_name(name)
        except ValueError as error:
            problems.append(str(error))
    problems += [f"there is no license {name!r}" for name in _listed(values.get("license")) if name not in LICENSES]
    allowed = {
        "language": (r"[a-z]{2,3}(-[A-Za-z]{2,4})?|code|multilingual", "a code of ISO 639, code or multilingual"),
        "base_model_relation": ("finetune|adapter|merge|quantized", "finetune, adapter, merge or quantized"),
    }
    for key, (pattern, what) in allowed.items():
        problems += [
            f"{key} must be {what}, got {value!r}"
            for value in _listed(values.get(key))
            if not re.fullmatch(pattern, str(value))
        ]
    for result in card.data.get("eval_results", []):
        value = result.metric_value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problems.append(f"{result.metric_name or result.metric_type} must be a finite number, got {value!r}")
    if problems:
        raise ValueError(f"The Hub would not take this card: {'; '.join(problems)}.")


def _check_name(name: Any) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{name!r} is no name on the Hub ({error})") from error


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _version(checkpoint: Checkpoint) -> str:
    """Of this package when it last changed the checkpoint, or now."""
    steps = () if checkpoint.lineage is None else checkpoint.lineage.steps
    made = [step.versions[PACKAGE] for step in steps if PACKAGE in step.versions]
    return made[-1] if made else installed_versions()[PACKAGE]
