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
        character: Right symbols among those asked for, each given the right ones before it.
        sequence: Rows in which all of them are right, which is what greedy decoding gets right.
    """

    character: float
    sequence: float


def string_accuracy(
    model: nn.Module, dataset: TaskStrings, batch_size: int = 64, chunk_length: int | None = None
) -> StringAccuracy:
    """How many symbols, and how many whole answers, a causal language model gets right in all rows of `dataset`.

    The model reads the right answer along with the prompt; the end token is not scored, as in the code of Jelassi et
    al. (arXiv:2402.01032). `batch_size` rows are in a forward pass, with `chunk_length` tokens of each.

    Raises:
        ValueError: for a model that knows fewer tokens than the task has, and as `greedy_hits`.
    """
    reader = reader_of(model)
    if reader.vocabulary < dataset.vocab_size:
        raise ValueError(
            f"The model's vocab_size is {reader.vocabulary}, but {dataset.name} with vocabulary {dataset.vocabulary} "
            f"has {dataset.vocab_size} tokens."
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
        task: The data that the model was trained on, or such.
        lengths: Symbols (pairs for recall) of a string; by default 1, 2 and 4 times the longest of `task`.
        samples, seed: Rows for each length, and their seed, which should not be that of the training data.
        batch_size, chunk_length: As for `string_accuracy`.

    Raises:
        ValueError: as `string_accuracy`, and for a length that is not possible with the task's vocabulary.
    """
    if lengths is None:
        lengths = [multiple * task.longest for multiple in (1, 2, 4)]
    data = {length: task.resized(length, samples, seed) for length in lengths}  # all checked before the first is run
    return {length: string_accuracy(model, rows, batch_size, chunk_length) for length, rows in data.items()}
