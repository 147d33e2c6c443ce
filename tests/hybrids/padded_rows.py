"""Rows with padding and packed rows, as words, and what each of their sequences gives alone."""

from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import RecurrentState, concatenate_rows, map_state, take_rows
from tests.hybrids.measures import random_tokens

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
    return torch.tensor(positions), real_of(words)


def real_of(words: list[str]) -> Tensor:
    """1 at tokens and 0 at padding."""
    return torch.tensor([[int(letter != ".") for letter in word] for word in words])


def places_of(word: str) -> list[list[int]]:
    """The places of each sequence of a row."""
    return [[p for p, x in enumerate(word) if x == letter] for letter in sorted(set(word) - {"."})]


def tokens_of(words: list[str], seed: int = 1) -> Tensor:
    return random_tokens(len(words), len(words[0]), seed)


def alone(
    model: Any, embeds: Tensor, state: RecurrentState, words: list[str], **options: Any
) -> tuple[Tensor, RecurrentState]:
    """Logits, zero at padding, and final states of each sequence by itself, the first one from the row's state."""
    logits = torch.zeros(*embeds.shape[:2], model.get_input_embeddings().num_embeddings, dtype=embeds.dtype)
    final = []
    for row, word in enumerate(words):
        carried = take_rows(state, slice(row, row + 1))
        for index, places in enumerate(places_of(word)):
            start = carried if index == 0 else map_state(torch.zeros_like, carried)
            output = model(
                inputs_embeds=embeds[row : row + 1, places], initial_state=start, output_final_state=True, **options
            )
            place = torch.tensor(row), torch.tensor(places)
            logits = logits.index_put(place, output.logits[0].to(embeds.dtype))
            carried = output.final_state
        final.append(carried)
    return logits, concatenate_rows(final)
