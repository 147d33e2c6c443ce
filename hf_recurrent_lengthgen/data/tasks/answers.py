"""Shared parts of the tasks: a prompt and its answer as tokens, and as a training item."""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks.keyed_rows import Array, Generated, drawn_lengths

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
            "together from parts; use a tokenizer that splits at white space."
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


class Prompts(Generated):
    """Training samples, whose length is in tokens: a prompt and its answer, made on access.

    An item is `{"input_ids": (n,), "labels": (n,)}`, int64. Labels are -100 except on the answer and the period after
    it, and the model shifts them. `PaddingCollator` makes batches of items of several lengths.

    Lengths are drawn so that in chunks of T tokens, one number of chunks is as frequent as another.
    """

    @abstractmethod
    def _task(self, index: int, generator: np.random.Generator, length: int) -> Task:
        """Prompt and answer of item `index`, of `length` tokens."""

    @property
    def item_lengths(self) -> list[int]:
        """Tokens of each item, by which trainers group them."""
        return self._lengths(np.arange(len(self))).tolist()

    def _lengths(self, rows: Array) -> Array:
        return drawn_lengths(self.seed, rows, self.shortest, self.longest)

    def task(self, index: int) -> Task:
        """Prompt and answer of item `index`."""
        index = range(len(self))[index]
        (length,) = self._lengths(np.array([index])).tolist()
        return self._task(index, np.random.default_rng([self.seed, index]), length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, answer, *_ = self.task(index)
        ignored = torch.full_like(prompt, IGNORED_LABEL)
        return {"input_ids": torch.cat([prompt, answer]), "labels": torch.cat([ignored, answer])}
