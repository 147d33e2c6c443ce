"""How often a model retrieves what was far back in a text: passkeys, needles, facts.

Accuracy by depth and length as in Chen et al., 2024 (arXiv:2410.07145), B.1 and Figure 2, Buitrago Ruiz and Gu, 2025
(arXiv:2507.02782), B.3 and B.4, and Shen et al., 2025 (arXiv:2509.22630), C.4. Decoding is greedy (`greedy_hits`).
Wrong answers that a task names (`Task.mistakes`) are recognized in the same way; a model whose state is no value reads
the prompt again for each.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.data.tasks import RetrievalGrid, Task
from hf_recurrent_lengthgen.evaluation.provenance import model_record, run_record
from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import NOT_SAID, DataRecord
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.shared_prefixes import greedy_hits
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalResult

TOKENS_AT_ONCE = 2**25
"""Maximum number of prompt tokens in memory at once, 4 bytes each, unless a single cell has more."""


class _Text(NamedTuple):
    """A prompt with an answer (n,) int32, the number of the prompt in its cell, where the answer begins, and its kind.

    The kind is one of `Task.mistakes`, or "" for the right answer.
    """

    ids: np.ndarray
    prompt: int
    start: int
    kind: str


class _Cell(NamedTuple):
    """A cell: its place (row, column), its prompts, and the texts to read."""

    place: tuple[int, int]
    digest: str
    tasks: list[Task]
    texts: list[_Text]


def retrieval_accuracy(
    model: nn.Module,
    grid: RetrievalGrid,
    lengths: Sequence[int],
    label: str = "model",
    data: DataRecord = NOT_SAID,
    training_length: int | None = None,
    settings: EvaluationSettings = DEFAULTS,
    *,
    cache: ResultCache | None = None,
) -> RetrievalResult:
    """Accuracy of greedy answers for each row of a grid of prompts and each length.

    Args:
        model: Any causal language model. With a state that is a value, shared beginnings of prompts are read once.
        grid: `PasskeyGrid`, `NeedleGrid`, `KeyGrid` or `BabilongGrid`.
        lengths: Different numbers of tokens of prompt and answer.
        label: Name of the model in tables and figures.
        data: Description of the prompts' source; the digest is always computed from all prompts.
        training_length: Training length of the model in tokens, if known.
        settings: Confidence, prompts and tokens of each per forward pass, progress, and the command that is recorded.
        cache: Cache of complete cells.

    Raises:
        ValueError: as in the grid for lengths without a prompt, and as in `greedy_hits`; both before any reading.
    """
    began, record = time.perf_counter(), model_record(model)
    run = _Run(reader_of(model), grid, sorted(lengths), settings, cache)
    digest = run.look_up(record)
    if not any(cell.samples for cell in run.cells.values()) and not run.missing:
        raise ValueError(
            f"No question fits into {max(lengths)} {data.token_unit}s together with its facts: give larger lengths."
        )
    run.measure()
    rows, columns = range(len(grid.rows)), range(len(lengths))
    return RetrievalResult(
        model=label,
        weights=record["weights"],
        training_length=training_length,
        task=grid.task,
        style=grid.style,
        shots=grid.shots,
        rows=grid.rows,
        depths=grid.depths,
        lengths=tuple(run.lengths),
        cells=tuple(tuple(run.cells[row, column] for column in columns) for row in rows),
        confidence=settings.confidence,
        data=replace(data, digest=digest),
        device=record["device"],
        command=settings.recorded_command,
        seed=grid.seed,
        **run_record(model, began),
    )


@dataclass
class _Run:
    """The measured cells of a grid, by place, and the cache keys of those that are missing."""

    reader: Reader
    grid: RetrievalGrid
    lengths: list[int]
    settings: EvaluationSettings
    cache: ResultCache | None
    cells: dict[tuple[int, int], RetrievalCell] = field(default_factory=dict)
    missing: dict[tuple[int, int], Any] = field(default_factory=dict)

    def look_up(self, record: dict[str, str]) -> str:
        """Make all prompts before the first is read, and return their digest; may take long."""
        digest = hashlib.sha256()
        for column, row in product(range(len(self.lengths)), range(len(self.grid.rows))):
            cell = self._cell((row, column))
            digest.update(cell.digest.encode())
            key = {"what": "retrieval cell", "model": record, "prompts": cell.digest}
            cached = self.cache.get(key) if self.cache else None
            if not cell.tasks:
                self.cells[cell.place] = RetrievalCell(0, 0, None)
            elif cached is not None:
                self.cells[cell.place] = RetrievalCell(**cached)
            else:
                self.missing[cell.place] = key
        return digest.hexdigest()

    def _cell(self, place: tuple[int, int]) -> _Cell:
        row, column = place
        tasks = self.grid.tasks(row, self.lengths[column])
        texts, digest = [], hashlib.sha256()
        for prompt, task in enumerate(tasks):
            # the period after an answer is not scored
            for kind, answer in (("", task.answer[: task.scored]), *task.mistakes):
                ids = np.concatenate([task.prompt, answer]).astype("<i4")
                what = f"{len(ids)} {len(answer)} {task.distance} {kind}".rstrip()
                digest.update(f"{what};".encode() + ids.tobytes())
                texts.append(_Text(ids, prompt, len(task.prompt), kind))
        return _Cell(place, digest.hexdigest(), tasks, texts)

    def measure(self) -> None:
        for group in self._groups():
            texts = [(cell, text) for cell in group for text in cell.texts]
            answers: dict[tuple[int, int], dict[int, str]] = {cell.place: {} for cell in group}
            left = {cell.place: len(cell.texts) for cell in group}
            for number, hits in greedy_hits(
                self.reader,
                [text.ids for _, text in texts],
                [text.start for _, text in texts],
                batch_size=self.settings.batch_size,
                chunk_length=self.settings.chunk_length,
                names=[self._name(cell.place) for cell, _ in texts],
                title=f"{self.grid.task} up to {self.lengths[group[-1].place[1]]:,}" if self.settings.progress else "",
            ):
                cell, text = texts[number]
                if hits.all() and answers[cell.place].get(text.prompt) != "":  # each prompt counts once
                    answers[cell.place][text.prompt] = text.kind
                left[cell.place] -= 1
                if not left[cell.place]:
                    self._store(cell, Counter(answers[cell.place].values()))

    def _groups(self) -> Iterator[list[_Cell]]:
        """The missing cells, in groups that fit into memory."""
        group: list[_Cell] = []
        size = 0
        for place in self.missing:
            cell = self._cell(place)
            tokens = sum(len(text.ids) for text in cell.texts)
            if group and size + tokens > TOKENS_AT_ONCE:
                yield group
                group, size = [], 0
            group.append(cell)
            size += tokens
        if group:
            yield group

    def _name(self, place: tuple[int, int]) -> str:
        where = "depth " if self.grid.depths is not None else ""
        return f"{self.grid.task}, {where}{self.grid.rows[place[0]]}, {self.lengths[place[1]]:,} tokens"

    def _store(self, cell: _Cell, kinds: Counter[str]) -> None:
        distances = [task.distance for task in cell.tasks]
        known = [distance for distance in distances if distance is not None]
        distance = max(known) if len(known) == len(distances) else None
        mistakes = {text.kind: kinds[text.kind] for text in cell.texts if text.kind}
        result = RetrievalCell(kinds[""], len(distances), distance, mistakes)
        self.cells[cell.place] = result
        if self.cache:
            self.cache.put(self.missing[cell.place], asdict(result))
