"""Rows with padding and packed rows against each of their sequences alone, for the support table and the tests."""

from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.wrapping import stateful
from hf_recurrent_lengthgen.models.state_value import RecurrentState, concatenate_rows, map_state, take_rows
from tests.hybrids.measures import gradients, parts, random_state, random_tokens, relative_error, weighted_sum
from tests.hybrids.tiny_models import tiny_model

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


def together(
    model: Any, embeds: Tensor, state: RecurrentState, words: list[str], **options: Any
) -> tuple[Tensor, RecurrentState]:
    """As `alone`, by one call of the model."""
    positions, mask = positions_and_mask(words)
    if any("b" in word for word in words):
        options["position_ids"] = positions
    output = model(inputs_embeds=embeds, attention_mask=mask, initial_state=state, output_final_state=True, **options)
    return output.logits.to(embeds.dtype) * mask[..., None], output.final_state


def leaves_of(model: Any, words: list[str]) -> tuple[Tensor, RecurrentState]:
    """Embeddings and initial states that take gradients."""
    embeds = model.get_input_embeddings()(tokens_of(words)).detach().requires_grad_()
    return embeds, random_state(model, len(words))


def errors(model: Any, words: list[str]) -> tuple[float, float, float]:
    """Largest relative errors of logits, final states, and gradients of all inputs, states and parameters."""
    embeds, state = leaves_of(model, words)
    found = []
    for read in (together, alone):
        logits, final = read(model, embeds, state, words)
        results = [logits, *parts(final)]
        found.append([*results, *gradients(weighted_sum(results), [embeds, *parts(state), *model.parameters()])])
    actual, expected = found
    states = 1 + len(parts(state))
    borders = ((0, 1), (1, states), (states, None))
    one, two, three = (relative_error(actual[a:b], expected[a:b]) for a, b in borders)
    return one, two, three


def measure_rows(model_type: str) -> tuple[float, float]:
    """The largest error of rows with padding, and of packed rows, of a tiny model in training mode."""
    model = stateful(tiny_model(model_type)).train()
    return max(errors(model, PADDED)), max(errors(model, PACKED))
