"""Toy models of the model contract whose NLL is known without running them."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

VOCABULARY = 7


class CounterModel(nn.Module):
    """Carries (tokens read, sum of their ids) and prefers one token by `strength(tokens read)` nats.

    The preferred token is the sum of all ids read, or the last id plus one (`last_only`), modulo the
    vocabulary. So a lost, doubled or reordered token, or a state not carried, changes every later NLL.
    """

    def __init__(self, strength: Callable[[Tensor], Tensor], last_only: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.strength, self.last_only = strength, last_only
        self.shapes: list[tuple[int, int]] = []

    def forward(
        self, input_ids: Tensor, initial_state: RecurrentState | None = None, output_final_state: bool = True
    ) -> SimpleNamespace:
        self.shapes.append(tuple(input_ids.shape))
        batch, length = input_ids.shape
        start = torch.zeros(batch, 2) if initial_state is None else initial_state[0].recurrent
        count = start[:, :1] + torch.arange(1, length + 1)
        total = start[:, 1:] + input_ids.cumsum(1)
        preferred = (input_ids + 1 if self.last_only else total.long()) % VOCABULARY
        logits = nn.functional.one_hot(preferred, VOCABULARY) * (self.scale * self.strength(count))[..., None]
        final = LayerState(torch.stack([count[:, -1], total[:, -1]], 1), torch.zeros(batch, 0))
        return SimpleNamespace(logits=self.dropout(logits), final_state=(final,))


def counter_nll(
    tokens: np.ndarray, start: int, stop: int, strength: Callable[[float], float], last_only: bool = False
) -> list[float]:
    """NLL of tokens[start + 1 : stop + 1] by a CounterModel that reads a row from `start`, by a loop."""
    nll, total = [], 0
    for position in range(start, stop):
        total += int(tokens[position])
        preferred = (int(tokens[position]) + 1 if last_only else total) % VOCABULARY
        bonus = strength(position - start + 1)
        hit = bonus if int(tokens[position + 1]) == preferred else 0.0
        nll.append(math.log(math.exp(bonus) + VOCABULARY - 1) - hit)
    return nll


@pytest.fixture(scope="session")
def counter_model() -> type[CounterModel]:
    return CounterModel


@pytest.fixture(scope="session")
def expected_nll() -> Callable[..., list[float]]:
    return counter_nll


@pytest.fixture
def random_tokens() -> np.ndarray:
    """Three sequences of 131 tokens: 130 positions to score."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (3, 131))
