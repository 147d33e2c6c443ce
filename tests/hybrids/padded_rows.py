"""Rows with padding and packed rows, as words, and what each of their sequences gives alone."""

import torch
from torch import Tensor

from tests.hybrids.measures import random_tokens
from tests.row_forms import real_of

# Each letter is a sequence, a dot is padding. Lengths up to one more than a chunk of the tiny models.
PADDED = [
    "....aaaaaaaaaaaaaaaaa",
    "aaaaaaaaaaaaa........",
    "..aaaa.a.aaaa..aaaa..",
    "aaaaaaaaaaaaaaaaaaaaa",
    "....................a",
    ".....................",
]
PACKED = [
    "aaaabccccccccccddddde",
    "aaaaaaaaaaaaaaaaaaaaa",
    "..aaa.bb.b..ccccc....",
    "a....................",
    ".....................",
]


def positions_and_mask(words: list[str]) -> tuple[Tensor, Tensor]:
    """`position_ids` that restart at each letter, and the mask, whose zeros are the dots."""
    positions = [[word[:place].count(letter) for place, letter in enumerate(word)] for word in words]
    return torch.tensor(positions), real_of(words).long()


def places_of(word: str) -> list[list[int]]:
    """The places of each sequence of a row."""
    return [[p for p, x in enumerate(word) if x == letter] for letter in sorted(set(word) - {"."})]


def tokens_of(words: list[str], seed: int = 1) -> Tensor:
    return random_tokens(len(words), len(words[0]), seed)
