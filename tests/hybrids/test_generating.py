"""`generate` from states after prompts behind padding: what each prompt alone gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import map_state, take_rows
from tests.hybrids.measures import random_state
from tests.hybrids.padded_rows import tokens_of
from tests.hybrids.tiny_models import tiny_model

LENGTHS = (4, 13, 1)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def prompts() -> tuple[Tensor, Tensor]:
    """Prompts behind padding, and their mask."""
    mask = torch.tensor([[0] * (13 - length) + [1] * length for length in LENGTHS])
    return tokens_of(["a" * 13] * 3).masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("model_type", ["falcon_h1", "lfm2"])
def test_beams_and_several_answers_are_those_of_each_alone(model_type: str) -> None:
    model, (tokens, mask) = stateful(tiny_model(model_type)), prompts()
    state = map_state(Tensor.detach, random_state(model, 3))
    beams = GREEDY | {"num_beams": 3, "num_return_sequences": 2}
    generated = model.generate(tokens, attention_mask=mask, initial_state=state, **beams)
    for row, length in enumerate(LENGTHS):
        one = take_rows(state, slice(row, row + 1))
        expected = model.generate(tokens[row : row + 1, -length:], initial_state=one, **beams)
        assert torch.equal(generated[2 * row : 2 * row + 2, 13:], expected[:, length:]), row


def test_prompts_may_be_embeddings() -> None:
    model, (tokens, mask) = stateful(tiny_model("qwen3_next")), prompts()
    state = map_state(Tensor.detach, random_state(model, 3))
    given = {"attention_mask": mask, "initial_state": state, **GREEDY}
    generated = model.generate(inputs_embeds=model.get_input_embeddings()(tokens), **given)
    assert torch.equal(generated, model.generate(tokens, **given)[:, 13:])


@pytest.mark.slow
def test_the_stock_minimax_generates_wrongly_after_padding() -> None:
    """Once this fails, the refusal can go."""
    stock, (tokens, mask) = tiny_model("minimax"), prompts()
    together = stock.generate(tokens, attention_mask=mask, **GREEDY)[:1, 13:]
    assert not torch.equal(together, stock.generate(tokens[:1, -LENGTHS[0] :], **GREEDY)[:, LENGTHS[0] :])


def test_prompts_that_cannot_be_read_or_continued_are_refused() -> None:
    model, (tokens, mask) = stateful(tiny_model("jamba")), prompts()
    tokens = tokens.clamp(min=3)
    state, cache = model.zero_state(3), model.new_attention_cache()
    for given, message in (
        ({"attention_mask": mask.flip(1)}, "padding before the prompts only: set padding_side='left'"),
        ({"attention_mask": mask * torch.tensor([[1], [1], [0]])}, "give each row a token"),
        ({"attention_mask": mask, "attention_cache": cache}, "takes no padding with an attention_cache"),
        ({"attention_cache": cache}, "drops the state when it reads more than one token with an attention_cache"),
        ({"attention_mask": mask, "prefill_chunk_size": 4}, "leave prefill_chunk_size out"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(tokens, initial_state=state, **given, **GREEDY)
