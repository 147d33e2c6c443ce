"""A number hidden in running text: the NIAH-single-2 task of RULER (Hsieh et al., 2024, arXiv:2404.06654).

The prompt is that of Shen et al., 2025 (arXiv:2509.22630), Table 12: numbers of 7 digits for {word}, in meaningful
text that does not repeat. The papers use the essays of Paul Graham. Here the caller gives texts, which fill the prompt
from the first on, with single spaces as in RULER. As there, {word} is an adjective and a noun (from our own lists),
and the needle is between two sentences.
"""

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.tasks.answers import Task, encode_answer, encode_next
from hf_recurrent_lengthgen.data.tasks.babilong import BackgroundText
from hf_recurrent_lengthgen.data.tokens import text_ids

NEEDLE_HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards."
)
NEEDLE = "One of the special magic numbers for {word} is: {number}."
NEEDLE_QUESTION = (
    "What is the special magic number for {word} mentioned in the provided text? The special magic number for {word} "
    "mentioned in the provided text is"
)
_ADJECTIVES, _NOUNS = (
    words.split()
    for words in (
        "amber ancient brave bright calm clever curious distant eager faint gentle golden happy hollow humble lively "
        "lonely mellow modest narrow noble patient plain proud quiet rapid rough silent simple sturdy tender vivid",
        "anchor basket bridge candle canyon castle cellar cloud compass desert engine feather forest garden hammer "
        "harbor island kettle ladder lantern meadow mirror orchard pebble pillow puzzle ribbon river saddle temple "
        "thunder tower window",
    )
)
WORDS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS)
"""All that {word} can be."""


def random_needle(generator: np.random.Generator) -> tuple[str, str]:
    """A word and its number of seven digits, which does not start with 0."""
    word = f"{_ADJECTIVES[generator.integers(len(_ADJECTIVES))]}-{_NOUNS[generator.integers(len(_NOUNS))]}"
    return word, str(generator.integers(1_000_000, 10_000_000))


def needle_prompt(
    tokenizer: PreTrainedTokenizerBase, haystack: BackgroundText, length: int, depth: float, word: str, number: str
) -> Task:
    """Prompt and answer, of `length` tokens together.

    Args:
        haystack: The text, which begins on its own line; its first tokens fill the prompt.
        depth: Share of the text before the needle, from 0 to 1. The needle is placed at the nearest end of a sentence,
            or on its own line at depth 0.

    Raises:
        ValueError: for a length or a text that is too short.
    """
    head, question = text_ids(tokenizer, NEEDLE_HEAD), encode_next(tokenizer, f"\n{NEEDLE_QUESTION.format(word=word)}")
    answer, scored = encode_answer(tokenizer, number)
    # the text before decides between a space and a line break, whose numbers of tokens may differ
    for mark in (" ", "\n"):
        needle = encode_next(tokenizer, mark + NEEDLE.format(word=word, number=number))
        shortest = len(head) + len(needle) + len(question) + len(answer)
        room, available = length - shortest, len(haystack.tokens)
        if not 0 <= room <= available:
            raise ValueError(
                f"length is {length}, but must be from {shortest}, the tokens of a prompt without text, to "
                f"{shortest + available}, since the text does not repeat: give more text, or another length"
            )
        before = _nearest_end(haystack.ends, depth * room, room)
        if (before == 0) == (mark == "\n"):
            break
    text = haystack.tokens
    parts = [torch.tensor(head), text[:before], torch.tensor(needle), text[before:room], torch.tensor(question)]
    return Task(torch.cat(parts), torch.tensor(answer), scored, room - before + len(question))


def _nearest_end(ends: np.ndarray, place: float, room: int) -> int:
    """The end of a sentence within `room` tokens that is nearest to a place; 0 counts as an end."""
    within = np.append(0, ends[ends <= room])
    return int(within[np.abs(within - place).argmin()])
