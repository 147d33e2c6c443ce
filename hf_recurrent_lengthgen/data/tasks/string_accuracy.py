"""Accuracy on the tasks of `strings.py`, at the training length and beyond."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks.answers import check_pieces
from hf_recurrent_lengthgen.data.tasks.strings import END_ID, TaskStrings
from hf_recurrent_lengthgen.models.evaluation_mode import evaluation_mode

EVALUATION_SEED = 2**40
"""Seed of rows for evaluation; training takes small ones."""


class StringAccuracy(NamedTuple):
    """Shares from 0 to 1.

    Attributes:
        character: Right symbols among those asked for, each given the right ones before it.
        sequence: Rows in which all of them are right, which is what greedy decoding gets right.
    """

    character: float
    sequence: float


@torch.inference_mode()
def string_accuracy(
    model: nn.Module, dataset: TaskStrings, batch_size: int = 64, chunk_length: int | None = None
) -> StringAccuracy:
    """How many symbols, and how many whole answers, a causal language model gets right, from the zero state.

    The model reads the right answer along with the prompt; the end token is not scored, as in the code of Jelassi et
    al. (arXiv:2402.01032). The model is given no mask, since padding stands on the right.

    Args:
        model: takes `input_ids` (B, T) and returns `logits` (B, T, V); it is in evaluation mode meanwhile.
        dataset: All its rows are read.
        batch_size: Rows of a forward pass.
        chunk_length: Tokens of a forward pass, with the state carried on; None for all at once. It bounds the memory
            of long rows.

    Raises:
        ValueError: for a batch size or chunk length below 1, a chunk length with a model that takes no initial state,
            and a model that knows fewer tokens than the task has.
    """
    check_pieces(model, batch_size, chunk_length)
    known = getattr(getattr(model, "config", None), "vocab_size", dataset.vocab_size)
    if known < dataset.vocab_size:
        raise ValueError(
            f"The model's vocab_size is {known}, but {dataset.name} with vocabulary {dataset.vocabulary} has "
            f"{dataset.vocab_size} tokens."
        )
    device = next(model.parameters()).device
    characters = right_characters = right_rows = 0
    with evaluation_mode(model):
        for start in range(0, len(dataset), batch_size):
            batch = dataset.batch(range(start, min(start + batch_size, len(dataset))))
            best = _best(model, batch["input_ids"][:, :-1].to(device), chunk_length)
            labels = batch["labels"][:, 1:]
            scored = (labels != IGNORED_LABEL) & (labels != END_ID)
            right = best.cpu() == labels
            characters += int(scored.sum())
            right_characters += int((right & scored).sum())
            right_rows += int((right | ~scored).all(1).sum())
    return StringAccuracy(right_characters / characters, right_rows / len(dataset))


def _best(model: nn.Module, ids: Tensor, chunk_length: int | None) -> Tensor:
    """The most likely token after each of `ids` (B, T)."""
    if chunk_length is None:
        logits: Tensor = model(input_ids=ids).logits
        return logits.argmax(-1)
    state, best = None, []
    for chunk in ids.split(chunk_length, dim=1):
        output = model(input_ids=chunk, initial_state=state)
        state = output.final_state
        best.append(output.logits.argmax(-1))
    return torch.cat(best, dim=1)


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
        samples: Rows for each length.
        seed: Their seed, which should not be that of the training data.
        chunk_length: See `string_accuracy`.

    Raises:
        ValueError: as `string_accuracy`, and for a length that is not possible with the task's vocabulary.
    """
    if lengths is None:
        lengths = [multiple * task.longest for multiple in (1, 2, 4)]
    data = {length: task.resized(length, samples, seed) for length in lengths}  # all checked before the first is run
    return {length: string_accuracy(model, rows, batch_size, chunk_length) for length, rows in data.items()}


def area_under_curve(accuracy: Mapping[int, float]) -> float:
    """Area under the generalization curve, accuracy against length, over its width: the mean accuracy, 0 to 1.

    The measure of arXiv:2410.11135, Figure 7; lengths need not be evenly spaced (trapezoidal rule). The paper does not
    say how it is scaled.

    Raises:
        ValueError: for fewer than two lengths.
    """
    points = sorted(accuracy.items())
    if len(points) < 2:
        raise ValueError(f"A curve needs at least two lengths, got {len(points)}.")
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(points))
    return area / (points[-1][0] - points[0][0])
