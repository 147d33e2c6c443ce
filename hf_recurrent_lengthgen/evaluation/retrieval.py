"""How often a model finds what stands far back in a text: passkeys, needles, facts.

Accuracy by depth and length as in "Stuffed Mamba" (arXiv:2410.07145), B.1 and Figure 2, "Unexplored states"
(arXiv:2507.02782), B.3 and B.4, and StateX (arXiv:2509.22630), C.4. Decoding is greedy: the model reads the right
answer along with the prompt, which counts if each of its tokens is the most likely one: greedy decoding gives it if
and only if no token on the way differs. Prompts of any length are read in pieces; what several of them begin with is
read once.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.data.tasks import RetrievalGrid, Task
from hf_recurrent_lengthgen.evaluation.provenance import installed_versions, model_record
from hf_recurrent_lengthgen.evaluation.readers import evaluation_mode, reader_of
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource, ForgettingRule
from hf_recurrent_lengthgen.evaluation.retrieval_results import RetrievalCell, RetrievalResult
from hf_recurrent_lengthgen.evaluation.shared_prefixes import greedy_hits
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE
from hf_recurrent_lengthgen.models.forgetting import Forgetting

TOKENS_AT_ONCE = 2**25
"""Most tokens of prompts in memory at a time, 4 bytes each, unless one cell has more."""

_Place = tuple[int, int]  # row, number of the length


class _Cell(NamedTuple):
    """A cell to be measured: where it stands, its digest, the prompts with their answers as (n,) int32."""

    place: _Place
    digest: str
    texts: list[np.ndarray]
    tasks: list[Task]


def retrieval_accuracy(
    model: nn.Module,
    grid: RetrievalGrid,
    lengths: Sequence[int],
    *,
    label: str,
    data_description: DataSource | str,
    token_unit: str = "token",
    training_length: int | None = None,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    cache: ResultCache | None = None,
    command: str = "",
    progress: bool = True,
) -> RetrievalResult:
    """Accuracy of greedy answers for each row of a grid of prompts and each length.

    Args:
        model: Any causal language model; of models whose state is a value, prompts share what they begin with.
        grid: `PasskeyGrid`, `NeedleGrid` or `BabilongGrid`.
        lengths: Tokens of prompt and answer, each once.
        label: Name of the model for people.
        data_description: What the prompts are made of.
        token_unit: What one token is, in the singular.
        training_length: Tokens that the model was trained on, if known.
        batch_size: Prompts read together; by default as many as memory limits allow, at most 16.
        chunk_length: Tokens of a forward pass for each; by default as many as memory limits allow.
        cache: Where cells are kept when they are complete; those that are there are not computed again.
        command: How this was run.
        progress: Show a progress bar.

    Raises:
        ValueError: as the grid for lengths without a prompt, and as `greedy_hits`; in both cases before any reading.
    """
    if not lengths or len(set(lengths)) < len(lengths) or min(lengths) < 1:
        raise ValueError(f"lengths must be at least one, each once and at least 1, got {list(lengths)}.")
    lengths, began = sorted(lengths), time.perf_counter()
    reader, record = reader_of(model), model_record(model)
    places = [(row, place) for place in range(len(lengths)) for row in range(len(grid.rows))]
    every = hashlib.sha256()
    cells: dict[_Place, RetrievalCell] = {}
    for place in places:  # all prompts are made before the first is read, which may take long
        cell = _cell(grid, lengths, place)
        every.update(cell.digest.encode())
        kept = cache.get(_key(record, cell.digest)) if cache else None
        if not cell.tasks:
            cells[place] = RetrievalCell(0, 0, None)
        elif kept is not None:
            cells[place] = RetrievalCell(**kept)
    if not any(cell.samples for cell in cells.values()) and len(cells) == len(places):
        raise ValueError(f"No question fits into {lengths[-1]} {token_unit}s with its facts: give larger lengths.")

    def run(group: Sequence[_Cell]) -> None:
        names = [_in_words(grid, lengths, cell.place) for cell in group]
        title = f"{grid.task} up to {lengths[group[-1].place[1]]:,}"
        _measure(reader, group, names, batch_size, chunk_length, title, progress, keep)

    def keep(cell: _Cell, found: RetrievalCell) -> None:
        cells[cell.place] = found
        if cache:
            cache.put(_key(record, cell.digest), asdict(found))

    with evaluation_mode(model):
        group: list[_Cell] = []
        for place in places:
            if place not in cells:
                cell = _cell(grid, lengths, place)
                if group and _size(group) + _size([cell]) > TOKENS_AT_ONCE:
                    run(group)
                    group = []
                group.append(cell)
        if group:
            run(group)
    return RetrievalResult(
        model=label,
        weights=record["weights"],
        training_length=training_length,
        task=grid.task,
        style=grid.style,
        shots=grid.shots,
        rows=grid.rows,
        depths=grid.depths,
        lengths=tuple(lengths),
        cells=tuple(tuple(cells[row, place] for place in range(len(lengths))) for row in range(len(grid.rows))),
        confidence=CONFIDENCE,
        data=DataRecord(DataSource.of(data_description), every.hexdigest(), token_unit),
        device=record["device"],
        versions=installed_versions(),
        command=command,
        seed=grid.seed,
        wall_seconds=time.perf_counter() - began,
        forgetting=ForgettingRule(**Forgetting.of(getattr(model, "config", None))._asdict()),
    )


def _cell(grid: RetrievalGrid, lengths: Sequence[int], place: _Place) -> _Cell:
    row, number = place
    tasks = grid.tasks(row, lengths[number])
    # the period after an answer is not asked for, and of the rest the last token is not read
    texts = [np.concatenate([task.prompt.numpy(), task.answer[: task.scored].numpy()]).astype("<i4") for task in tasks]
    digest = hashlib.sha256()
    for task, text in zip(tasks, texts, strict=True):
        digest.update(f"{len(text)} {task.scored} {task.distance};".encode() + text.tobytes())
    return _Cell(place, digest.hexdigest(), texts, tasks)


def _key(record: dict[str, str], digest: str) -> dict[str, Any]:
    return {"what": "retrieval cell", "model": record, "prompts": digest}


def _size(cells: Sequence[_Cell]) -> int:
    return sum(len(text) for cell in cells for text in cell.texts)


def _in_words(grid: RetrievalGrid, lengths: Sequence[int], place: _Place) -> str:
    row, number = place
    where = "depth " if grid.depths is not None else ""
    return f"{grid.task}, {where}{grid.rows[row]}, {lengths[number]:,} tokens"


def _measure(
    reader: Any,
    cells: Sequence[_Cell],
    names: Sequence[str],
    batch_size: int | None,
    chunk_length: int | None,
    title: str,
    progress: bool,
    keep: Any,
) -> None:
    """Read the prompts of some cells; `keep(cell, found)` is called when a cell is complete."""
    owners = [number for number, cell in enumerate(cells) for _ in cell.tasks]
    tasks = [task for cell in cells for task in cell.tasks]
    texts = [text for cell in cells for text in cell.texts]
    starts = [len(text) - task.scored for text, task in zip(texts, tasks, strict=True)]
    right: list[list[bool]] = [[] for _ in cells]
    for text, hits in greedy_hits(
        reader,
        texts,
        starts,
        batch_size=batch_size,
        chunk_length=chunk_length,
        names=[names[owner] for owner in owners],
        title=title if progress else "",
    ):
        owner = owners[text]
        right[owner].append(bool(hits.all()))
        if len(right[owner]) == len(cells[owner].tasks):
            keep(cells[owner], _found(cells[owner].tasks, right[owner]))


def _found(tasks: Sequence[Task], right: Sequence[bool]) -> RetrievalCell:
    distances = [task.distance for task in tasks if task.distance is not None]
    return RetrievalCell(sum(right), len(right), max(distances) if len(distances) == len(tasks) else None)
