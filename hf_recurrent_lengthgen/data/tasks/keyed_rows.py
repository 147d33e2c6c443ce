"""Datasets whose sequences are generated on access; random numbers depend only on a seed, a row and a place.

So a sequence is the same in every process. The generator is SplitMix64 (Steele, Lea & Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014): a hash of a counter. It makes a batch at once, as one numpy generator
per row cannot.
"""

import copy
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Array = np.ndarray[Any, np.dtype[Any]]

LENGTH_STREAM = 0
"""Stream of the lengths of strings; other quantities have other numbers."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_STREAM = np.uint64(1 << 32)


def random_bits(seed: int, rows: Array, count: int, stream: int) -> Array:
    """64 random bits for each of `count` places of each row.

    Args:
        seed: At least 0 and below 2**64.
        rows: (B,) integers of at least 0.
        count: n, below 2**32.
        stream: Number of the quantity to draw; streams are independent.

    Returns:
        (B, n) uint64.
    """
    start = _mixed(np.array([seed], np.uint64) + _STEP)
    keys = _mixed(start + rows.astype(np.uint64) * _STEP)  # (B,)
    places = np.arange(1, count + 1, dtype=np.uint64) + np.array([stream], np.uint64) * _STREAM
    return _mixed(keys[:, None] + places * _STEP)


def random_integers(seed: int, rows: Array, count: int, below: Array | int, stream: int) -> Array:
    """Uniform integers from 0 to `below` - 1, (B, n) int64; `below` is a bound of at most 2**31, or (B, 1) bounds."""
    high = random_bits(seed, rows, count, stream) >> np.uint64(32)
    return ((high * np.asarray(below).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def random_orders(seed: int, rows: Array, size: int, stream: int) -> Array:
    """A uniform permutation of 0 .. `size` - 1 for each row, (B, size) int64."""
    return random_bits(seed, rows, size, stream).argsort(axis=1)


def _mixed(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


EVALUATION_SEED = 2**40
"""Seed of sequences for evaluation; training uses small seeds."""
Lengths = int | tuple[int, int] | list[int]


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


class Generated(Dataset[dict[str, Tensor]], ABC):
    """Sequences that are made on access; sequence i depends only on the seed and i.

    Args:
        length: Of a sequence in the task's unit, or its minimum and maximum: (50, 100) draws a length for each one.
        samples: Number of sequences, as large as a run needs.
        seed: Seed, at least 0; evaluation needs a different one than training.

    Attributes:
        shortest: Minimum length.
        longest: Maximum length.

    Raises:
        ValueError: for an impossible length, number of samples or seed.
        TypeError: for numbers that are not whole.
    """

    name: str

    @property
    def longest_possible(self) -> float:
        return math.inf

    def __init__(self, length: Lengths, samples: int, seed: int) -> None:
        bounds = [operator.index(bound) for bound in np.array(length, dtype=object, ndmin=1)]
        self.shortest, self.longest = bounds[0], bounds[-1]
        self.samples, self.seed = operator.index(samples), operator.index(seed)
        fits = len(bounds) < 3 and 1 <= self.shortest <= self.longest <= self.longest_possible
        if self.samples < 1 or not 0 <= self.seed < 2**63 or not fits:
            bound = self.longest_possible
            upper = "" if bound == math.inf else f" to {bound} (as the vocabulary allows)"
            raise ValueError(
                f"{self.name}: the length must be a number, or a minimum and a maximum, from 1{upper}, samples at "
                f"least 1 and seed from 0 to 2**63 - 1; got {length}, {samples} and {seed}."
            )

    @property
    def resume_record(self) -> dict[str, Any]:
        """JSON values that identify the sequences, except for their number; a resumed run must have the same."""
        return {"length": [self.shortest, self.longest], "seed": self.seed}

    def __len__(self) -> int:
        return self.samples


class KeyedRows(Generated):
    """Sequences of random strings, whose length is in symbols.

    An item is `{"input_ids": (T,), "labels": ...}`, int64. Sequences of several lengths have an "attention_mask" (T,)
    of ones, which `PaddingCollator` pads. A `DataLoader` requests a whole batch at once (`__getitems__`).
    """

    @property
    def resume_record(self) -> dict[str, Any]:
        return {"name": self.name} | super().resume_record

    @abstractmethod
    def _rows(self, rows: Array, lengths: Array) -> Rows:
        """The rows (B,) with strings of the lengths (B,)."""

    def resized(self, length: Lengths, samples: int, seed: int) -> Self:
        """The same task with strings of another length."""
        other = copy.copy(self)
        Generated.__init__(other, length, samples, seed)
        return other

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Rows as `{"input_ids": (B, T), "labels": (B, ...)}`, padded on the right to the longest row.

        Rows of different lengths also have an "attention_mask" (B, T), 1 at real tokens.
        """
        tokens, labels, sizes = self._at(indices)
        batch = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if sizes.min() < sizes.max():
            mask = (np.arange(tokens.shape[1]) < sizes[:, None]).astype(np.int64)
            batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The items of several rows, made together."""
        tokens, labels, sizes = self._at(indices)
        items = []
        for row, label, size in zip(torch.from_numpy(tokens), torch.from_numpy(labels), sizes.tolist(), strict=True):
            item = {"input_ids": row[:size], "labels": label[:size] if label.ndim else label}
            if self.shortest < self.longest:
                item["attention_mask"] = torch.ones_like(item["input_ids"])
            items.append(item)
        return items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def _at(self, indices: Sequence[int]) -> Rows:
        rows = np.asarray(indices, np.int64)
        if rows.min() < -len(self) or rows.max() >= len(self):
            raise IndexError(f"rows {list(indices)} of {len(self)}")
        rows = rows % len(self)
        return self._rows(rows, drawn_lengths(self.seed, rows, self.shortest, self.longest))
