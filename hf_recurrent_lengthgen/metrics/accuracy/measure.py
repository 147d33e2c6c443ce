"""Accuracy on the tasks of `data/tasks/strings.py`, at the training length and beyond."""

import hashlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, TaskStrings
from hf_recurrent_lengthgen.data.tasks.strings import END_ID
from hf_recurrent_lengthgen.evaluation.provenance import model_record, run_record
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.shared_prefixes import greedy_hits
from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyResult, LengthAccuracy
from hf_recurrent_lengthgen.metrics.retrieval.result import Share


class StringAccuracy(NamedTuple):
    """Shares from 0 to 1.

    Attributes:
        character: Right symbols among the scored ones, each given the right symbols before it.
        sequence: Rows in which all scored symbols are right, which greedy decoding gets right.
    """

    character: float
    sequence: float


def string_accuracy(
    model: nn.Module, dataset: TaskStrings, batch_size: int = 64, chunk_length: int | None = None
) -> StringAccuracy:
    """The shares of symbols and of whole answers that a causal language model gets right in all rows of `dataset`.

    The model reads the right answer with the prompt. The end token is not scored, as in the code of Jelassi et al.,
    2024 (arXiv:2402.01032). A forward pass has `batch_size` rows, with `chunk_length` tokens of each.

    Raises:
        ValueError: for a model whose vocabulary is smaller than that of the task, and as in `greedy_hits`.
    """
    symbols, answers, _ = _right(model, dataset, batch_size, chunk_length)
    return StringAccuracy(symbols.right / symbols.samples, answers.right / answers.samples)


def _right(
    model: nn.Module, dataset: TaskStrings, batch_size: int | None, chunk_length: int | None
) -> tuple[Share, Share, list[np.ndarray]]:
    """Right symbols, right whole answers, and the token ids of the strings."""
    reader = reader_of(model)
    if reader.vocabulary < dataset.vocab_size:
        raise ValueError(
            f"The model's vocab_size {reader.vocabulary} is too small: {dataset.name} with vocabulary "
            f"{dataset.vocabulary} has {dataset.vocab_size} tokens."
        )
    rows = dataset.__getitems__(range(len(dataset)))
    labels = [row["labels"].numpy() for row in rows]
    starts = [int((label != IGNORED_LABEL).argmax()) for label in labels]
    texts = [row["input_ids"].numpy() for row in rows]
    asked_for = right_symbols = right_rows = 0
    for index, hits in greedy_hits(reader, texts, starts, batch_size=batch_size, chunk_length=chunk_length):
        asked = labels[index][starts[index] :]
        right = hits[(asked != IGNORED_LABEL) & (asked != END_ID)]
        asked_for += len(right)
        right_symbols += int(right.sum())
        right_rows += bool(right.all())
    return Share(right_symbols, asked_for), Share(right_rows, len(dataset)), texts


def accuracy_by_length(
    model: nn.Module,
    task: TaskStrings,
    lengths: Sequence[int] | None = None,
    samples: int = 256,
    batch_size: int = 64,
    seed: int = EVALUATION_SEED,
    chunk_length: int | None = None,
) -> dict[int, StringAccuracy]:
    """`string_accuracy` at several lengths of a task's strings.

    Args:
        task: Data like those that the model was trained on.
        lengths: Symbols (pairs for recall) per string; by default 1, 2 and 4 times the longest of `task`.
        samples, seed: Rows per length, and their seed, which should differ from that of the training data.
        batch_size, chunk_length: As in `string_accuracy`.

    Raises:
        ValueError: as in `string_accuracy`, and for a length that is impossible with the task's vocabulary.
    """
    data = _strings(task, lengths, samples, seed)
    return {length: string_accuracy(model, rows, batch_size, chunk_length) for length, rows in data.items()}


def measure_accuracy(
    model: nn.Module,
    task: TaskStrings,
    lengths: Sequence[int] | None = None,
    label: str = "model",
    training_length: int | None = None,
    settings: EvaluationSettings = DEFAULTS,
    *,
    samples: int = 256,
) -> AccuracyResult:
    """`accuracy_by_length` with counts and with a record of what was measured.

    Args:
        label: Name of the model for people.
        training_length: Symbols of the longest string in training, if known.
        settings: Seed (`EVALUATION_SEED` is added), rows and tokens of each per forward pass, and the command that is
            recorded.

    Raises:
        ValueError: as `accuracy_by_length`.
    """
    began, record = time.perf_counter(), model_record(model)
    data, digest, accuracies = _strings(task, lengths, samples, EVALUATION_SEED + settings.seed), hashlib.sha256(), []
    for length in sorted(data):
        symbols, answers, texts = _right(model, data[length], settings.batch_size, settings.chunk_length)
        accuracies.append(LengthAccuracy(length, symbols, answers))
        digest.update(b"".join(text.astype("<i8").tobytes() for text in texts))
    return AccuracyResult(
        model=label,
        weights=record["weights"],
        training_length=training_length,
        task=task.name,
        vocabulary=task.vocabulary,
        lengths=tuple(accuracies),
        data=DataRecord(DataSource(f"{task.name} of random symbols"), digest.hexdigest(), token_unit="symbol"),
        device=record["device"],
        command=settings.recorded_command,
        seed=settings.seed,
        **run_record(model, began),
    )


def _strings(task: TaskStrings, lengths: Sequence[int] | None, samples: int, seed: int) -> dict[int, TaskStrings]:
    """Strings of each length, all of which are checked before the first is read."""
    if lengths is None:
        lengths = [multiple * task.longest for multiple in (1, 2, 4)]
    return {length: task.resized(length, samples, seed) for length in lengths}
