"""Accuracy on the tasks of `data/tasks/strings.py`, at the training length and beyond."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, TaskStrings
from hf_recurrent_lengthgen.data.tasks.strings import END_ID
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.shared_prefixes import greedy_hits


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
    characters = right_characters = right_rows = 0
    for index, hits in greedy_hits(reader, texts, starts, batch_size=batch_size, chunk_length=chunk_length):
        asked = labels[index][starts[index] :]
        right = hits[(asked != IGNORED_LABEL) & (asked != END_ID)]
        characters += len(right)
        right_characters += int(right.sum())
        right_rows += bool(right.all())
    return StringAccuracy(right_characters / characters, right_rows / len(dataset))


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
    if lengths is None:
        lengths = [multiple * task.longest for multiple in (1, 2, 4)]
    data = {length: task.resized(length, samples, seed) for length in lengths}  # checks all before the first run
    return {length: string_accuracy(model, rows, batch_size, chunk_length) for length, rows in data.items()}
