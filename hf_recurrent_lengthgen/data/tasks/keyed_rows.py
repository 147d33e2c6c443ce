"""Datasets whose rows are generated on access, with strings of one length or of several."""

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.data.tasks.keyed_random import LENGTH_STREAM, Array, random_integers

EVALUATION_SEED = 2**40
"""Seed of rows for evaluation; training uses small seeds."""
Lengths = int | tuple[int, int] | list[int]


def length_bounds(length: Lengths, name: str) -> tuple[int, int]:
    """The minimum and the maximum of a length.

    Raises:
        ValueError: for an impossible length.
        TypeError: for numbers that are not whole.
    """
    bounds = [operator.index(bound) for bound in np.array(length, dtype=object, ndmin=1)]
    if len(bounds) not in (1, 2) or not 1 <= bounds[0] <= bounds[-1]:
        raise ValueError(
            f"The length of {name} is {length!r}, but must be a number of at least 1, or a minimum and a maximum, in "
            "this order."
        )
    return bounds[0], bounds[-1]


def drawn_lengths(seed: int, rows: Array, shortest: Array | int, longest: int) -> Array:
    """Uniform lengths (B,), int64, from `shortest`, a number or (B,), to `longest`; they depend on seed and row."""
    choices = np.reshape(longest - np.asarray(shortest) + 1, (-1, 1))
    return shortest + random_integers(seed, rows, 1, choices, LENGTH_STREAM)[:, 0]


class Rows(NamedTuple):
    """B rows, padded on the right to the longest.

    Attributes:
        tokens: (B, T) token ids.
        labels: (B, T) token ids or -100; or (B,) numbers.
        sizes: (B,) real tokens.
    """

    tokens: Array
    labels: Array
    sizes: Array


class KeyedRows(Dataset[dict[str, Tensor]], ABC):
    """Rows of random strings; row i depends only on the seed and i.

    An item is `{"input_ids": (T,), "labels": ...}`, int64. Rows of several lengths have an "attention_mask" (T,) of
    ones, which `PaddingCollator` pads. A `DataLoader` requests a whole batch at once (`__getitems__`). Rows are
    generated on access, so `samples` may be as large as a run needs.

    Args:
        length: Symbols per string, or their minimum and maximum: (50, 100) draws a length for each row.
        samples: Number of rows.
        seed: Seed, at least 0; evaluation needs a different one than training.

    Attributes:
        shortest: Minimum number of symbols in a string.
        longest: Maximum number of symbols in a string.

    Raises:
        ValueError: for an impossible length, number of samples or seed.
        TypeError: for numbers that are not whole.
    """

    name: str

    def __init__(self, length: Lengths, samples: int, seed: int) -> None:
        self.shortest, self.longest = length_bounds(length, self.name)
        self.samples, self.seed = operator.index(samples), operator.index(seed)
        if self.samples < 1 or not 0 <= self.seed < 2**63:
            raise ValueError(f"samples must be at least 1 and seed from 0 to 2**63 - 1, got {samples} and {seed}.")
        self._check()

    @property
    def resume_record(self) -> dict[str, Any]:
        """JSON values that identify the rows, except for their number; a resumed run must have the same."""
        return {"name": self.name, "length": [self.shortest, self.longest], "seed": self.seed}

    @abstractmethod
    def _rows(self, rows: Array, lengths: Array) -> Rows:
        """The rows (B,) with strings of the lengths (B,)."""

    def _check(self) -> None:
        """Refuse settings that do not fit the length."""

    def resized(self, length: Lengths, samples: int, seed: int) -> Self:
        """The same task with strings of another length.

        Raises:
            ValueError: as in the class.
        """
        other = copy.copy(self)
        KeyedRows.__init__(other, length, samples, seed)
        return other

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Rows as `{"input_ids": (B, T), "labels": (B, ...)}`, padded on the right to the longest row.

        Rows of different lengths also have an "attention_mask" (B, T), 1 at real tokens.
        """
        tokens, labels, sizes = self._asked(indices)
        batch = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if sizes.min() < sizes.max():
            mask = (np.arange(tokens.shape[1]) < sizes[:, None]).astype(np.int64)
            batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The items of several rows, made together."""
        tokens, labels, sizes = self._asked(indices)
        items = []
        for row, label, size in zip(torch.from_numpy(tokens), torch.from_numpy(labels), sizes.tolist(), strict=True):
            item = {"input_ids": row[:size], "labels": label[:size] if label.ndim else label}
            if self.shortest < self.longest:
                item["attention_mask"] = torch.ones_like(item["input_ids"])
            items.append(item)
        return items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def _asked(self, indices: Sequence[int]) -> Rows:
        rows = np.asarray(indices, np.int64)
        if rows.size == 0 or rows.min() < -len(self) or rows.max() >= len(self):
            raise IndexError(f"rows {list(indices)} of {len(self)}")
        rows = rows % len(self)
        return self._rows(rows, drawn_lengths(self.seed, rows, self.shortest, self.longest))
