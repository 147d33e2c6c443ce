"""Learned states of wrapped models, of one type for each kind of mixer; `uses.py` tries all types."""

from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state

from .tiny_models import tiny_model

GENERATION = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
OF_OTHER_KINDS = ("xlstm",)
"""Types whose parts are no memory alone: a random state has denominators that are negative."""


def wrapped(model_type: str) -> Any:
    return stateful(tiny_model(model_type)).eval()


def tokens_of(model: Any, rows: int = 2, length: int = 9) -> torch.Tensor:
    ids: torch.Tensor = torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.manual_seed(0))
    return ids


def state_of(model: Any) -> RecurrentState:
    """A random state of one row; for types of other kinds, that after some tokens."""
    if model.config.model_type in OF_OTHER_KINDS:
        with torch.no_grad():
            return model(tokens_of(model, 1), output_final_state=True).final_state  # type: ignore[no-any-return]
    generator = torch.Generator().manual_seed(1)
    return map_state(lambda part: torch.randn(part.shape, generator=generator), model.zero_state(1))


def rows_of(state: RecurrentState, rows: int) -> RecurrentState:
    return map_state(lambda part: part.expand(rows, *part.shape[1:]), state)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "lfm2", "qwen3_next", "mamba", "xlstm"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=str)
def test_generation_starts_from_it(model_type: str, how: dict[str, Any]) -> None:
    model = wrapped(model_type)
    prompt, state = tokens_of(model, length=4), state_of(model)
    model.add_learned_state("one", state)
    expected = model.generate(prompt, initial_state=rows_of(state, 2), **GENERATION, **how)
    assert model.generate(prompt, **GENERATION, **how).tolist() == expected.tolist()
    text = prompt  # a slow loop that reads the whole text for each token
    if not how:
        for _ in range(4):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
        assert expected.tolist() == text.tolist()


def test_calls_with_and_without_a_cache_start_from_it() -> None:
    model = wrapped("granitemoehybrid")
    tokens = tokens_of(model)
    model.add_learned_state("one", state_of(model))
    for cached in (True, False):
        torch.testing.assert_close(model(tokens, use_cache=cached).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    cache = model.cache_from_state(model.first_state(2))
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["bamba", "qwen3_next"])
def test_every_sequence_of_a_packed_row_starts_from_it(model_type: str) -> None:
    model = wrapped(model_type)
    model.add_learned_state("one", state_of(model))
    tokens, positions = tokens_of(model, 1), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for options in ({}, {"output_final_state": True}):
        packed = model(tokens, position_ids=positions, **options)
        alone = [model(part, **options) for part in tokens.split([4, 5], dim=1)]
        torch.testing.assert_close(packed.logits, torch.cat([one.logits for one in alone], dim=1), rtol=0, atol=1e-5)
