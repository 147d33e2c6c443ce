"""Shared parts of the tasks: a prompt and its answer as tokens, and as a training item."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL

_ANCHOR = "a"  # a letter does not merge with the space or line break after it


class Task(NamedTuple):
    """Token ids of a question and its answer, int64.

    Attributes:
        prompt: (n,), up to the beginning of the answer.
        answer: (m,), the answer and the period after it, on which training also has a loss.
        scored: Number of tokens of `answer` that must be right in evaluation: all before the period.
        distance: Tokens of the prompt after the needle (after the first of several facts); None if unknown.
        mistakes: Wrong answers that say what went wrong, by kind, each (k,) without a period; a kind may have several.
    """

    prompt: Tensor
    answer: Tensor
    scored: int
    distance: int | None = None
    mistakes: tuple[tuple[str, Tensor], ...] = ()


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a part of a text, without special tokens, as `token_stream` reads it."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    return tokenizer(text, verbose=False, **options)["input_ids"]


def encode_next(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that follows another one, without what some tokenizers put before a first word.

    Args:
        text: Must start with a space or a line break, so that no token crosses its start.

    Raises:
        ValueError: for a tokenizer with tokens that cross it.
    """
    anchor, both = encode(tokenizer, _ANCHOR), encode(tokenizer, _ANCHOR + text)
    if both[: len(anchor)] != anchor:
        raise ValueError(
            f"{type(tokenizer).__name__} merges {text[:10]!r} with the word before it, so tasks cannot be put "
            "together from pieces; use a tokenizer that splits at white space."
        )
    return both[len(anchor) :]


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> tuple[list[int], int]:
    """Token ids of " answer.", and the number of ids before the period.

    Raises:
        ValueError: for a tokenizer that merges the period with the answer.
    """
    ids, without_period = encode_next(tokenizer, f" {answer}."), encode_next(tokenizer, f" {answer}")
    if ids[: len(without_period)] != without_period:
        raise ValueError(f"{type(tokenizer).__name__} merges the period with the answer {answer!r}; use another one.")
    return ids, len(without_period)


def training_item(task: Task) -> dict[str, Tensor]:
    """`{"input_ids": (n + m,), "labels": (n + m,)}`, int64; labels are -100 except on the answer and its period."""
    return {
        "input_ids": torch.cat([task.prompt, task.answer]),
        "labels": torch.cat([torch.full_like(task.prompt, IGNORED_LABEL), task.answer]),
    }
