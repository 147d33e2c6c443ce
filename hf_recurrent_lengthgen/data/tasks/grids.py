"""Prompts of retrieval tasks by row (depth of the needle, or bAbI task) and length, for `metrics.retrieval`.

The prompts of a cell depend on the seed, its row and the index of the sample, not on the length. So all lengths have
the same keys, and prompts share prefixes of tokens. Solved examples (`shots`) are the same in all prompts of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.tasks.answers import Task
from hf_recurrent_lengthgen.data.tasks.babilong import (
    BabilongPrompts,
    BabiQuestion,
    BackgroundText,
    NoQuestionFitsError,
)
from hf_recurrent_lengthgen.data.tasks.needle import Haystack, NeedleTemplate, random_needle
from hf_recurrent_lengthgen.data.tasks.passkey import PasskeyTemplate, random_key

_SHOTS = 2**32 - 1
"""Stands for the row in the random numbers of the solved examples."""


class RetrievalGrid(ABC):
    """Prompts by row and length.

    Attributes:
        task: Name of the task.
        style: Style of the prompt.
        rows: Name of each row.
        depths: Depth of the needle (or of the first fact needed) in each row, from 0 (start) to 1 (end); None for rows
            of another kind.
        samples: Maximum number of prompts in a cell.
        seed: Seed, at least 0.
        shots: Number of solved examples before a prompt.
    """

    task: str
    style: str

    def __init__(
        self, rows: Sequence[str], depths: Sequence[float] | None, samples: int, seed: int, shots: int
    ) -> None:
        if not rows or samples < 1 or seed < 0 or shots < 0:
            raise ValueError(
                f"{self.task} needs at least 1 {'depth' if depths is not None else 'task'}, at least 1 sample, and a "
                f"seed and shots of at least 0, got {len(rows)}, {samples}, {seed} and {shots}"
            )
        if len(set(rows)) < len(rows):
            raise ValueError(f"the rows of {self.task} must be different, got {', '.join(rows)}")
        self.rows, self.depths = tuple(rows), None if depths is None else tuple(float(depth) for depth in depths)
        self.samples, self.seed, self.shots = samples, seed, shots

    @abstractmethod
    def tasks(self, row: int, length: int) -> list[Task]:
        """Prompts and answers of one cell, each of `length` tokens.

        Raises:
            ValueError: for a length that is too short for a prompt with a needle, or too long for the text.
        """

    def _generator(self, row: int, sample: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, row, sample])


def depth_name(depth: float) -> str:
    """A depth in percent; a `ValueError` for a depth outside [0, 1]."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}, but must be from 0 (start) to 1 (end)")
    return f"{100 * depth:.4g} %"


class PasskeyGrid(RetrievalGrid):
    """`passkey_prompt`s; see `RetrievalGrid` for the arguments."""

    task = "passkey"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        depths: Sequence[float],
        samples: int,
        seed: int = 0,
        style: str = "pass key",
        shots: int = 0,
    ) -> None:
        super().__init__([depth_name(depth) for depth in depths], depths, samples, seed, shots)
        self._tokenizer, self.style = tokenizer, style
        self._shots = [random_key(self._generator(_SHOTS, number)) for number in range(shots)]
        self._template = PasskeyTemplate(tokenizer, 0, style, self._shots)  # refuses an unknown style at once

    def tasks(self, row: int, length: int) -> list[Task]:
        assert self.depths is not None
        if self._template.length != length:
            self._template = PasskeyTemplate(self._tokenizer, length, self.style, self._shots)
        keys = [random_key(self._generator(row, sample)) for sample in range(self.samples)]
        return [self._template.fill(self.depths[row], key) for key in keys]


class NeedleGrid(RetrievalGrid):
    """Prompts of `NeedleTemplate`; see `RetrievalGrid` for the other arguments.

    Args:
        texts: Texts in which needles are hidden, in this order, each once.
    """

    task = "niah"
    style = "single-2"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Iterable[str],
        depths: Sequence[float],
        samples: int,
        seed: int = 0,
        shots: int = 0,
    ) -> None:
        super().__init__([depth_name(depth) for depth in depths], depths, samples, seed, shots)
        self._tokenizer, self._haystack = tokenizer, Haystack(tokenizer, texts)
        self._shots = [random_needle(self._generator(_SHOTS, number)) for number in range(shots)]

    def tasks(self, row: int, length: int) -> list[Task]:
        assert self.depths is not None
        template = NeedleTemplate(self._tokenizer, self._haystack, length, self._shots)
        needles = [random_needle(self._generator(row, sample)) for sample in range(self.samples)]
        return [template.fill(self.depths[row], *needle) for needle in needles]


class BabilongGrid(RetrievalGrid):
    """`BabilongPrompts`, one row per bAbI task, or per task and depth; a cell has fewer samples, or none, if facts do
    not fit.

    Args:
        questions: Name of a task -> its questions, of which `samples` random ones that fit are used.
        background: Texts between the facts.
        examples: Name of a task -> questions for the solved examples; needed with shots.
        depths: Of the first fact that an answer needs, see `BabilongPrompts`; all have the same questions and
            background. None for facts at random places.
    """

    task = "babilong"
    style = "sentences"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        questions: Mapping[str, Sequence[BabiQuestion]],
        background: Iterable[str],
        samples: int,
        seed: int = 0,
        shots: int = 0,
        examples: Mapping[str, Sequence[BabiQuestion]] | None = None,
        depths: Sequence[float] | None = None,
    ) -> None:
        names = [depth_name(depth) for depth in depths or ()]
        rows = [f"{task}, {name}" for task in questions for name in names] or list(questions)
        of_rows = None if depths is None else [*depths] * len(questions)
        super().__init__(rows, of_rows, samples, seed, shots)
        self._tokenizer, self._background = tokenizer, BackgroundText(tokenizer, background)
        self._questions, self._examples = [], []
        for number, (name, asked) in enumerate(questions.items()):
            self._questions.append(self._shuffled(asked, number, 0))
            solved = (examples or {}).get(name, ())
            if len(solved) < shots:
                raise ValueError(f"shots is {shots}, but {name} has only {len(solved)} questions for examples")
            self._examples.append(self._shuffled(solved, number, 1)[:shots])

    def _shuffled(self, questions: Sequence[BabiQuestion], number: int, part: int) -> list[BabiQuestion]:
        order = np.random.default_rng([self.seed, number, part]).permutation(len(questions))
        return [questions[index] for index in order]

    def tasks(self, row: int, length: int) -> list[Task]:
        number, depth = row, None
        if self.depths is not None:
            number, depth = row * len(self._questions) // len(self.rows), self.depths[row]
        asked, solved = self._questions[number], self._examples[number]
        try:
            prompts = BabilongPrompts(self._tokenizer, asked, self._background, length, self.seed, solved, depth)
        except NoQuestionFitsError:
            return []
        return [prompts.task(index) for index in range(min(self.samples, len(prompts)))]
