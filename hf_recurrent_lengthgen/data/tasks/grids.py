"""Prompts of retrieval tasks by row (depth of the needle, or bAbI task) and length, for `metrics.retrieval`.

The prompts of a cell depend on the seed, its row and the index of the sample, not on the length. So all lengths have
the same keys, and prompts share prefixes of tokens.
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
from hf_recurrent_lengthgen.data.tasks.needle import needle_prompt, random_needle
from hf_recurrent_lengthgen.data.tasks.passkey import PasskeyTemplate, random_key

DEPTHS = tuple(index / 10 for index in range(10))
"""Usual depths of a needle: from the start of the text, without the end, which is the easiest (Chen et al., 2024)."""


class RetrievalGrid(ABC):
    """Prompts by row and length.

    Attributes:
        task: Name of the task.
        style: Style of the prompt.
        rows: Name of each row.
        depths: Depth of the needle in each row, from 0 (start) to 1 (end); None for rows of another kind.
        samples: Maximum number of prompts in a cell.
        seed: Seed, at least 0.
        shots: Number of solved examples before a prompt, the same in all prompts of a row.
    """

    task: str
    style: str
    depths: tuple[float, ...] | None = None
    shots = 0

    def __init__(self, rows: Sequence[str], samples: int, seed: int) -> None:
        self.rows, self.samples, self.seed = tuple(rows), samples, seed

    @abstractmethod
    def tasks(self, row: int, length: int) -> list[Task]:
        """Prompts and answers of one cell, each of `length` tokens.

        Raises:
            ValueError: for a length that is too short for a prompt with a needle, or too long for the text.
        """


class DepthGrid(RetrievalGrid):
    """A row for each depth of the needle."""

    depths: tuple[float, ...]

    def __init__(self, depths: Sequence[float], samples: int, seed: int) -> None:
        if wrong := [depth for depth in depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth is {wrong[0]}, but must be from 0 (start) to 1 (end)")
        super().__init__([f"{100 * depth:.4g} %" for depth in depths], samples, seed)
        self.depths = tuple(map(float, depths))

    def tasks(self, row: int, length: int) -> list[Task]:
        generators = (np.random.default_rng([self.seed, row, sample]) for sample in range(self.samples))
        return [self._task(generator, length, self.depths[row]) for generator in generators]

    @abstractmethod
    def _task(self, generator: np.random.Generator, length: int, depth: float) -> Task:
        """A prompt and its answer; what is drawn does not depend on the length."""


class PasskeyGrid(DepthGrid):
    """Prompts of a `PasskeyTemplate`; see `RetrievalGrid` for the arguments."""

    task = "passkey"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        depths: Sequence[float],
        samples: int,
        seed: int = 0,
        style: str = "pass key",
    ) -> None:
        super().__init__(depths, samples, seed)
        self._tokenizer, self.style = tokenizer, style
        self._template = PasskeyTemplate(tokenizer, 0, style)  # refuses an unknown style at once

    def _task(self, generator: np.random.Generator, length: int, depth: float) -> Task:
        if self._template.length != length:
            self._template = PasskeyTemplate(self._tokenizer, length, self.style)
        return self._template.fill(depth, random_key(generator))


class NeedleGrid(DepthGrid):
    """`needle_prompt`s; see `RetrievalGrid` for the other arguments.

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
    ) -> None:
        super().__init__(depths, samples, seed)
        self._tokenizer, self._haystack = tokenizer, BackgroundText(tokenizer, texts, first="\n")

    def _task(self, generator: np.random.Generator, length: int, depth: float) -> Task:
        return needle_prompt(self._tokenizer, self._haystack, length, depth, *random_needle(generator))


class BabilongGrid(RetrievalGrid):
    """`BabilongPrompts`, one row per bAbI task; a cell has fewer samples, or none, if facts do not fit.

    Args:
        questions: Name of a task -> its questions, of which `samples` random ones that fit are used.
        background: Texts between the facts.
        examples: Name of a task -> questions for the solved examples; needed with shots.
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
    ) -> None:
        super().__init__(list(questions), samples, seed)
        self.shots = shots
        self._tokenizer, self._background = tokenizer, BackgroundText(tokenizer, background)
        self._questions, self._examples = [], []
        for number, (name, of_task) in enumerate(questions.items()):
            self._questions.append(self._shuffled(of_task, number, 0))
            solved = (examples or {}).get(name, ())
            if not 0 <= shots <= len(solved):
                raise ValueError(
                    f"shots is {shots}, but must be from 0 to the {len(solved)} example questions of {name}"
                )
            self._examples.append(self._shuffled(solved, number, 1)[:shots])

    def _shuffled(self, questions: Sequence[BabiQuestion], number: int, part: int) -> list[BabiQuestion]:
        order = np.random.default_rng([self.seed, number, part]).permutation(len(questions))
        return [questions[index] for index in order]

    def tasks(self, row: int, length: int) -> list[Task]:
        questions, solved = self._questions[row], self._examples[row]
        try:
            prompts = BabilongPrompts(self._tokenizer, questions, self._background, length, self.seed, solved)
        except NoQuestionFitsError:
            return []
        return [prompts.task(index) for index in range(min(self.samples, len(prompts)))]
