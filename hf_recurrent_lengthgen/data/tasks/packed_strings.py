"""Several strings in a row, as in the code of Jelassi et al., 2024 (arXiv:2402.01032; `CopyDataset`)."""

from typing import Any

import numpy as np

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks.keyed_rows import Array, KeyedRows, Rows, drawn_lengths
from hf_recurrent_lengthgen.data.tasks.strings import TaskStrings


class PackedStrings(KeyedRows):
    """Rows of `row_length` tokens, ".ab|ab..cde|cde..fg": whole strings, then the start of one more without labels.

    Nothing resets the state between the strings of a row: a model reads each after those before it. Items are those of
    `KeyedRows`, all of one length. Row i has its own strings, which depend only on their seed and i. `strings` is the
    task, by which a model is measured. The paper's rows have 220 tokens, and its begin token is one of its own.

    Args:
        strings: The task, which may begin its strings with the end token; the number of its strings does not matter.
        row_length: T, at least that of the longest string.
        samples: Number of rows.

    Raises:
        ValueError: for rows that are too short, and as in `KeyedRows`.
    """

    def __init__(self, strings: TaskStrings, row_length: int, samples: int) -> None:
        self.strings, self.name = strings, strings.name
        super().__init__(row_length, samples, strings.seed)
        if self.row_length < strings.row_length:
            raise ValueError(
                f"{self.name}: rows of {row_length} tokens do not hold the longest string with its answer, which has "
                f"{strings.row_length}: give longer rows (task_row_length) or shorter strings (task_length)."
            )

    @property
    def row_length(self) -> int:
        """T, number of tokens in a row."""
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
        whole = ends.reshape(-1, 1) <= self.row_length
        real = np.arange(strings.tokens.shape[1]) < strings.sizes[:, None]
        starts = ends[:, -1:].cumsum(0) - ends[:, -1:]  # (B, 1), where a row begins among the tokens of all strings
        places = starts + np.arange(self.row_length)
        labels = np.where(whole, strings.labels, IGNORED_LABEL)[real][places]
        return Rows(strings.tokens[real][places], labels, lengths)
