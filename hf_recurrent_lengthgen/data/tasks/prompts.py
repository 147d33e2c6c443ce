"""Training samples that are a prompt and its answer, made on access."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.data.tasks.answers import Task, training_item
from hf_recurrent_lengthgen.data.tasks.keyed_random import Array
from hf_recurrent_lengthgen.data.tasks.keyed_rows import Lengths, drawn_lengths, length_bounds


class Prompts(Dataset[dict[str, Tensor]], ABC):
    """Training samples; item i depends only on the seed and i.

    An item is `{"input_ids": (n,), "labels": (n,)}`, int64. Labels are -100 except on the answer and the period after
    it, and the model shifts them. `PaddingCollator` makes batches of items of several lengths.

    Args:
        length: Tokens per sample, or their minimum and maximum: (128, 8192) draws a length for each sample. In pieces
            of T tokens, one number of pieces is as frequent as another.
        samples: Number of samples, at least 1.
        seed: Seed, at least 0.
        name: What messages call them.

    Attributes:
        longest: Maximum number of tokens of a sample.
    """

    def __init__(self, length: Lengths, samples: int, seed: int, name: str) -> None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        self.samples, self.seed = samples, seed
        self.shortest, self.longest = length_bounds(length, name)

    @abstractmethod
    def _task(self, index: int, generator: np.random.Generator, length: int) -> Task:
        """Prompt and answer of item `index`, of `length` tokens."""

    @property
    def resume_record(self) -> dict[str, Any]:
        """JSON values that identify the samples, except for their number; a resumed run must have the same."""
        return {"length": [self.shortest, self.longest], "seed": self.seed}

    @property
    def item_lengths(self) -> list[int]:
        """The length of each item, by which trainers group them."""
        return self._lengths(np.arange(len(self))).tolist()

    def _lengths(self, rows: Array) -> Array:
        return drawn_lengths(self.seed, rows, self.shortest, self.longest)

    def __len__(self) -> int:
        return self.samples

    def task(self, index: int) -> Task:
        """Prompt and answer of item `index`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        (length,) = self._lengths(np.array([index])).tolist()
        return self._task(index, np.random.default_rng([self.seed, index]), length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return training_item(self.task(index))
