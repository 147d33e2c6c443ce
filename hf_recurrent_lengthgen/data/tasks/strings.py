"""Synthetic tasks on strings of symbols: a prompt, a delimiter, the answer and an end token.

The tasks of Trockman et al., 2024 (arXiv:2410.11135), section 2 and Eq. 10-11, which follow Jelassi et al., 2024
(arXiv:2402.01032). The code of the latter has a begin token and packs several strings into a sequence, as
`PackedStrings` does; here a sequence is one string, which may begin with the end token, as if it followed another.
Without it a model that starts from the state of another string cannot tell where its own begins.

Token ids: 0 padding, 1 delimiter, 2 end, then the symbols, so a model needs `vocabulary` + 3 ids.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from hf_recurrent_lengthgen.data.collating import PADDING_ID
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks.keyed_rows import (
    Array,
    KeyedRows,
    Lengths,
    Rows,
    drawn_lengths,
    random_bits,
    random_integers,
    random_orders,
)

DELIMITER_ID, END_ID, FIRST_SYMBOL_ID = 1, 2, 3
_SYMBOLS, _ORDER, _QUERIES = range(1, 4)  # streams of random numbers


class StringParts(NamedTuple):
    """Prompt and answer of B rows, padded on the right to the longest.

    Attributes:
        prompt: (B, P) token ids.
        answer: (B, P) token ids.
        scored: (B, P), whether a place of the answer has a label; (1, P) if that is the same in all rows.
        sizes: (B,) real tokens of prompt and answer, each.
    """

    prompt: Array
    answer: Array
    scored: Array
    sizes: Array


class TaskStrings(KeyedRows):
    """Sequences "prompt | answer .", or ". prompt | answer .".

    An item is `{"input_ids": (T,), "labels": (T,)}`, int64. Labels are -100 outside the scored part of the answer, and
    the model shifts them. See `KeyedRows` for the other arguments.

    Args:
        vocabulary: Number of symbols.

    Attributes:
        name: Name of the task on the command line.
        begin: Whether a sequence begins with the end token.
        vocab_size: Number of token ids that a model needs.
        row_length: T, number of tokens in the longest sequence.
    """

    name: str
    begin = False
    tokens_per_symbol = 1  # in the prompt
    end_is_scored = True

    def __init__(self, length: Lengths, vocabulary: int = 512, samples: int = 1_000_000, seed: int = 0) -> None:
        self.vocabulary = operator.index(vocabulary)
        super().__init__(length, samples, seed)

    @abstractmethod
    def _parts(self, rows: Array, lengths: Array) -> StringParts:
        """Prompt and answer of rows (B,) whose strings have the lengths (B,)."""

    @property
    def vocab_size(self) -> int:
        return FIRST_SYMBOL_ID + self.vocabulary

    @property
    def row_length(self) -> int:
        return 2 * self.tokens_per_symbol * self.longest + 2 + self.begin

    @property
    def record(self) -> dict[str, Any]:
        """The record of the task in a checkpoint's config; `string_task(**record)` restores the task."""
        begin = {"begin": True} if self.begin else {}
        return {"name": self.name, "length": [self.shortest, self.longest], "vocabulary": self.vocabulary} | begin

    @property
    def resume_record(self) -> dict[str, Any]:
        return super().resume_record | self.record

    def _rows(self, rows: Array, lengths: Array) -> Rows:
        parts = self._parts(rows, lengths)
        count = parts.sizes[:, None]  # (B, 1)
        longest = int(parts.sizes.max())
        places = np.arange(-int(self.begin), 2 * longest + 2)[None]  # (1, T): -1 is before the prompt
        after = places - count - 1  # place in the answer
        in_answer, at_end = (after >= 0) & (after < count), after == count
        prompt = np.take_along_axis(parts.prompt, places.clip(0, longest - 1), 1)
        after = after.clip(0, longest - 1)
        answer = np.take_along_axis(parts.answer, after, 1)
        conditions = [at_end | (places < 0), places < count, places == count, in_answer]
        tokens = np.select(conditions, [END_ID, prompt, DELIMITER_ID, answer], PADDING_ID)
        scored = np.take_along_axis(np.broadcast_to(parts.scored, parts.answer.shape), after, 1)
        scored = (in_answer & scored) | (at_end & self.end_is_scored)
        return Rows(tokens, np.where(scored, tokens, IGNORED_LABEL), 2 * parts.sizes + 2 + self.begin)


class CopyingStrings(TaskStrings):
    """ "abc | abc ." or, in stack order, "abc | cba ."; symbols are uniform, with replacement.

    Trockman et al., 2024, train on up to 50 symbols; Buitrago Ruiz and Gu, 2025 (Table 1), train on 50 to 100 and test
    on 300.

    Args:
        reverse: Whether the answer is the string from its end to its start.
    """

    def __init__(
        self, length: Lengths, vocabulary: int = 26, samples: int = 1_000_000, seed: int = 0, reverse: bool = False
    ) -> None:
        self.reverse = reverse
        self.name = "stack_copying" if reverse else "copying"
        super().__init__(length, vocabulary, samples, seed)

    def _parts(self, rows: Array, lengths: Array) -> StringParts:
        longest = int(lengths.max())
        string = FIRST_SYMBOL_ID + random_integers(self.seed, rows, longest, self.vocabulary, _SYMBOLS)
        answer = string
        if self.reverse:
            backwards = lengths[:, None] - 1 - np.arange(longest)
            answer = np.take_along_axis(string, backwards.clip(0), 1)
        return StringParts(string, answer, np.ones((1, longest), bool), lengths)


class SortingStrings(TaskStrings):
    """ "cab | abc .": the symbols of a string in ascending order; no symbol occurs twice.

    As in Trockman et al., 2024, section 4, with a vocabulary of 512. The vocabulary must be at least the length.
    """

    name = "sorting"

    @property
    def longest_possible(self) -> int:
        return self.vocabulary

    def _parts(self, rows: Array, lengths: Array) -> StringParts:
        longest = int(lengths.max())
        string = random_orders(self.seed, rows, self.vocabulary, _ORDER)[:, :longest]
        beyond = np.arange(longest) >= lengths[:, None]
        answer = np.sort(np.where(beyond, self.vocabulary, string), axis=1)
        return StringParts(FIRST_SYMBOL_ID + string, FIRST_SYMBOL_ID + answer, np.ones((1, longest), bool), lengths)


class AssociativeRecall(TaskStrings):
    """ "a1 b2 c3 | c3 a1 b2 .": pairs of key and value, then all keys in random order, each with its value.

    Multi-query associative recall of Trockman et al., 2024, Eq. 11: each key occurs once, and only values have labels.
    The first half of the symbols (rounded down) are keys, the others values. Values are uniform, with replacement
    (zoology, whose code the paper used, draws them without).

    Args:
        pairs: Number of pairs, or its minimum and maximum; the vocabulary must have as many keys.
    """

    name = "recall"
    tokens_per_symbol = 2
    end_is_scored = False

    def __init__(self, pairs: Lengths, vocabulary: int = 512, samples: int = 1_000_000, seed: int = 0) -> None:
        super().__init__(pairs, vocabulary, samples, seed)

    @property
    def longest_possible(self) -> int:
        return self.vocabulary // 2

    def _parts(self, rows: Array, lengths: Array) -> StringParts:
        pairs, number_of_keys = int(lengths.max()), self.vocabulary // 2
        keys = random_orders(self.seed, rows, number_of_keys, _ORDER)[:, :pairs]
        values = number_of_keys + random_integers(self.seed, rows, pairs, self.vocabulary - number_of_keys, _SYMBOLS)
        first = FIRST_SYMBOL_ID + np.stack([keys, values], 2)  # (B, pairs, 2)
        ranks = random_bits(self.seed, rows, pairs, _QUERIES)
        beyond = np.arange(pairs) >= lengths[:, None]
        order = np.where(beyond, np.uint64(2**64 - 1), ranks).argsort(axis=1)
        queries = np.take_along_axis(first, order[:, :, None], 1)
        scored = (np.arange(2 * pairs) % 2 == 1)[None]
        return StringParts(first.reshape(len(rows), -1), queries.reshape(len(rows), -1), scored, 2 * lengths)


class PackedStrings(KeyedRows):
    """Sequences of `row_length` tokens, ".ab|ab..cde|cde..fg": whole strings, and the unlabelled start of one more.

    As in the code of Jelassi et al., 2024 (`CopyDataset`; 220 tokens), nothing resets the state between the strings of
    a sequence. Sequence i has its own strings, which depend only on their seed and i.

    Args:
        strings: The task, by which a model is measured; the number of its strings does not matter.
        row_length: T, at least that of the longest string.
        samples: Number of sequences.

    Raises:
        ValueError: for sequences that are too short, and as in `KeyedRows`.
    """

    def __init__(self, strings: TaskStrings, row_length: int, samples: int) -> None:
        self.strings, self.name = strings, strings.name
        super().__init__(operator.index(row_length), samples, strings.seed)
        if self.row_length < strings.row_length:
            raise ValueError(
                f"{self.name}: sequences of {row_length} tokens do not hold the longest string with its answer, which "
                f"has {strings.row_length}: give longer sequences (task_row_length) or shorter strings (task_length)."
            )

    def resized(self, length: Any, samples: int, seed: int) -> Self:
        """Sequences of `length` tokens with strings of the same lengths, drawn from this seed."""
        strings = self.strings.resized((self.strings.shortest, self.strings.longest), samples, seed)
        return type(self)(strings, length, samples)

    @property
    def row_length(self) -> int:
        return self.longest

    @property
    def resume_record(self) -> dict[str, Any]:
        return self.strings.resume_record | {"row_length": self.row_length}

    def _rows(self, rows: Array, lengths: Array) -> Rows:
        task = self.strings
        shortest = task.row_length - 2 * task.tokens_per_symbol * (task.longest - task.shortest)
        count = -(-self.row_length // shortest)  # K: even the shortest strings fill a row
        numbers = (rows[:, None] * count + np.arange(count)).ravel()  # (B K,)
        strings = task._rows(numbers, drawn_lengths(self.seed, numbers, task.shortest, task.longest))
        ends = strings.sizes.reshape(-1, count).cumsum(1)  # (B, K), in tokens of the row
        labels = np.where(ends.reshape(-1, 1) <= self.row_length, strings.labels, IGNORED_LABEL)
        real = np.arange(labels.shape[1]) < strings.sizes[:, None]
        places = (ends[:, -1:].cumsum(0) - ends[:, -1:]) + np.arange(self.row_length)  # (B, T), among all `real`
        return Rows(strings.tokens[real][places], labels[real][places], lengths)


_TASKS: dict[str, Callable[..., TaskStrings]] = {
    "copying": CopyingStrings,
    "stack_copying": partial(CopyingStrings, reverse=True),
    "recall": AssociativeRecall,
    "sorting": SortingStrings,
}
STRING_TASKS = tuple(_TASKS)


def string_task(
    name: str,
    length: Lengths,
    vocabulary: int | None = None,
    samples: int = 1_000_000,
    seed: int = 0,
    begin: bool = False,
) -> TaskStrings:
    """A task by its name.

    Args:
        name: One of `STRING_TASKS`.
        length: Symbols per string (pairs for recall), or their minimum and maximum.
        vocabulary: Number of symbols; None for the task's default, 26 for copying and 512 for the others.
        samples: Number of sequences.
        seed: Seed of the sequences.
        begin: Whether sequences begin with the end token.

    Raises:
        ValueError: for another name, and as in the tasks.
    """
    if name not in _TASKS:
        raise ValueError(f"The task is {name!r}, but must be one of {', '.join(_TASKS)}.")
    symbols = {} if vocabulary is None else {"vocabulary": vocabulary}
    task = _TASKS[name](length, **symbols, samples=samples, seed=seed)
    task.begin = begin
    return task
