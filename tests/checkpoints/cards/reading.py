"""What the tests read in cards and in results."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from hf_recurrent_lengthgen.checkpoints.cards import card
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalResult
from tests.checkpoints.cards.conftest import Work

MINUS = "\N{MINUS SIGN}"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def written(value: float, form: str = ".3f") -> str:
    return format(value, form).replace("-", MINUS)


def shown(text: str) -> str:
    """What a reader sees of a Markdown line."""
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    return html.unescape(re.sub(r"<[^>]+>", "", rendered)).strip()


def evaluations(work: Work) -> dict[str, Any]:
    """The evaluations of the result file by role, as plain JSON."""
    return {model["role"]: model["evaluation"] for model in json.loads(work.results.read_text())["models"]}


def changed(work: Work, to: Path, change: Callable[[dict[str, Any]], None], role: str = "intervention") -> Path:
    """The result file with another evaluation of the model of a role."""
    plain = json.loads(work.results.read_text())
    change(next(model["evaluation"] for model in plain["models"] if model["role"] == role))
    to.write_text(json.dumps(plain))
    return to


def metadata_of(text: str) -> dict[str, Any]:
    return ModelCard(text).data.to_dict()


WORDS = "Trained by A. Person for `fun`.\n\n## Use\n\n- *not* for harm --- of anybody\n<!-- mine -->"


def written_into(readme: Path, words: str = WORDS) -> None:
    """As a person does it, in an editor."""
    begin, end = card.OWN_WORDS
    text = readme.read_text()
    assert text.count(f"{begin}\n\n{end}") == 1
    readme.write_text(text.replace(f"{begin}\n\n{end}", f"{begin}\n{words}\n\n\n{end}"))


def retrieval(work: Work, model: str = "intervention", weights: str | None = None) -> RetrievalResult:
    return RetrievalResult(
        model=model,
        weights=weights or evaluations(work)["intervention"]["weights"],
        training_length=8,
        task="passkey",
        style="pass key",
        shots=0,
        rows=("0 %", "100 %"),
        depths=(0.0, 1.0),
        lengths=(64, 128),
        cells=(
            (RetrievalCell(9, 10, 50), RetrievalCell(1, 10, 100)),
            (RetrievalCell(10, 10, 5), RetrievalCell(4, 10, 5)),
        ),
        confidence=0.95,
        data=DataRecord(DataSource("repeated sentences"), "ab" * 32, "byte"),
        device="cpu",
        versions={"torch": "2"},
        command=f"lengthgen retrieve {work.folder}/intervention",
        seed=0,
        wall_seconds=1.0,
    )
