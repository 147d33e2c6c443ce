"""Passkey retrieval: a number hidden in repeated sentences (Mohtashami and Jaggi, 2023, arXiv:2305.16300).

As in Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), B.4 and Figure 8: 5-digit keys, a random depth for each sample,
filler cut so that all samples have the same length, loss only on the key and the period after it. (The figure shows a
key of 4 digits, the text says 5; keys have 5 here.) The other prompts are those of Chen et al., 2024
(arXiv:2410.07145), B.1, and of Shen et al., 2025 (arXiv:2509.22630), Table 12, after infinity-bench.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.tasks.answers import Prompts, Task, encode_answer, encode_next
from hf_recurrent_lengthgen.data.tasks.keyed_rows import Lengths
from hf_recurrent_lengthgen.data.tokens import text_ids

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class PasskeyStyle(NamedTuple):
    """Texts of a prompt: `head`, filler, `needle`, filler, `question`; the key replaces `{key}`.

    Attributes:
        between: Separator between two repetitions of the filler.
    """

    head: str
    needle: str
    question: str
    between: str


PASSKEY_STYLES = {
    # Buitrago Ruiz and Gu, 2025, Figure 8, in the words of Mohtashami and Jaggi
    "pass key": PasskeyStyle(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz "
        "you about the important information there.",
        "The pass key is {key}. Remember it. {key} is the pass key.",
        "What is the pass key? The pass key is",
        " ",
    ),
    # Chen et al., 2024, B.1
    "passkey": PasskeyStyle(
        "There is important info hidden inside a lot of irrelevant text. Find it and memorize it.",
        "The passkey is {key}. Remember it. {key} is the passkey.",
        "What is the passkey? The passkey is",
        "\n",
    ),
    # Shen et al., 2025, Table 12: no instruction, and a line of filler before the key at any depth
    "infinity-bench": PasskeyStyle(
        _FILLER,
        "The pass key is {key}. Remember it. {key} is the pass key.",
        "What is the pass key? The pass key is",
        "\n",
    ),
}


class PasskeyTemplate:
    """The parts of prompts up to a length as token ids; each paragraph is on its own line.

    Args:
        length: Tokens of prompt and answer, or the maximum for `fill`.
        style: "pass key" (Buitrago Ruiz and Gu, 2025), "passkey" (Chen et al., 2024) or "infinity-bench" (Shen et al.,
            2025).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int, style: str = "pass key") -> None:
        self.tokenizer, self.length, self.texts = tokenizer, length, PASSKEY_STYLES[style]
        self.head = text_ids(tokenizer, self.texts.head)
        self.question = encode_next(tokenizer, f"\n{self.texts.question}")
        again = encode_next(tokenizer, self.texts.between + _FILLER)
        self.filler = torch.tensor(encode_next(tokenizer, f"\n{_FILLER}") + again * (max(length, 0) // len(again) + 1))

    def fill(self, depth: float, key: str, length: int | None = None) -> Task:
        """A prompt up to "The pass key is" and its answer; `depth` is the share of the filler before the key, from 0.

        Raises:
            ValueError: for a length that is too short, and a wrong depth.
        """
        length = self.length if length is None else length
        if not 0 <= depth <= 1:
            raise ValueError(f"depth is {depth}, but must be from 0 (start) to 1 (end)")
        needle = encode_next(self.tokenizer, f"\n{self.texts.needle.format(key=key)}")
        answer, scored = encode_answer(self.tokenizer, key)
        shortest = len(self.head) + len(needle) + len(self.question) + len(answer)
        room = length - shortest
        if room < 0:
            raise ValueError(
                f"length is {length}, but a passkey prompt without filler has {shortest} tokens: give more"
            )
        before = round(depth * room)
        after = room - before
        # both parts of filler begin with its first sentence and are cut at their end
        start, end = torch.tensor(self.head), torch.tensor(self.question)
        prompt = torch.cat([start, self.filler[:before], torch.tensor(needle), self.filler[:after], end])
        return Task(prompt, torch.tensor(answer), scored, after + len(self.question))


def random_key(generator: np.random.Generator) -> str:
    """Five digits, of which the first is not 0."""
    return str(generator.integers(10_000, 100_000))


class PasskeyPrompts(Prompts):
    """Training samples as `Prompts` describes them. The key is uniform in 10000..99999, the depth in [0, 1].

    Args:
        length, samples, seed: As in `Prompts`.
        style: See `PasskeyTemplate`.
    """

    name = "passkey prompts"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, length: Lengths, samples: int, seed: int = 0, style: str = "pass key"
    ) -> None:
        super().__init__(length, samples, seed)
        self.style = style
        self._template = PasskeyTemplate(tokenizer, self.longest, style)
        self._template.fill(0, "10000", self.shortest)  # refuses a length that is too short at once

    @property
    def resume_record(self) -> dict[str, Any]:
        return super().resume_record | {"style": self.style}

    def _task(self, index: int, generator: np.random.Generator, length: int) -> Task:
        return self._template.fill(generator.uniform(), random_key(generator), length)
