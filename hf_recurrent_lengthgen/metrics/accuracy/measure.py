"""Accuracy on the tasks of `data/tasks/strings.py`, at the training length and beyond."""

import hashlib
import time
from collections.abc import Sequence

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


def count_right(
    model: nn.Module, dataset: TaskStrings, batch_size: int | None = None, chunk_length: int | None = None
) -> tuple[Share, Share, list[np.ndarray]]:
    """Right symbols, right whole answers (which greedy decoding gives), and the token ids of the strings.

    The model reads the right answer with the prompt. The end token is not scored, as in the code of Jelassi et al.,
    2024 (arXiv:2402.01032). A forward pass has `batch_size` sequences, with `chunk_length` tokens of each.

    Raises:
        ValueError: for a model whose vocabulary is smaller than that of the task, and as in `greedy_hits`.
    """
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
    symbols = right_symbols = right_answers = 0
    for index, hits in greedy_hits(reader, texts, starts, batch_size=batch_size, chunk_length=chunk_length):
        answer = labels[index][starts[index] :]
        right = hits[(answer != IGNORED_LABEL) & (answer != END_ID)]
        symbols += len(right)
        right_symbols += int(right.sum())
        right_answers += bool(right.all())
    return Share(right_symbols, symbols), Share(right_answers, len(dataset)), texts


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
    """The shares of symbols and of whole answers that a causal language model gets right, by length of the strings.

    Args:
        task: Data like those that the model was trained on.
        lengths: Symbols (pairs for recall) per string; by default 1, 2 and 4 times the longest of `task`, as far as
            its vocabulary allows.
        label: Name of the model for people.
        training_length: Symbols of the longest string in training, if known.
        settings: Seed (`EVALUATION_SEED` is added), sequences and tokens of each per forward pass, and the command
            that is recorded.
        samples: Sequences per length.

    Raises:
        ValueError: as `count_right`, and for a length that is impossible with the task's vocabulary.
    """
    began, record = time.perf_counter(), model_record(model)
    multiples = [times * task.longest for times in (1, 2, 4) if times * task.longest <= task.longest_possible]
    lengths = sorted(lengths or multiples)
    # all are checked before the first is read
    data = [task.resized(length, samples, EVALUATION_SEED + settings.seed) for length in lengths]
    digest, accuracies = hashlib.sha256(), []
    for length, strings in zip(lengths, data, strict=True):
        symbols, answers, texts = count_right(model, strings, settings.batch_size, settings.chunk_length)
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
