"""Padding and packed rows in wrapped models: each sequence gives what it gives alone."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import relative_error, with_stock_mixers
from tests.hybrids.padded_rows import (
    PACKED,
    places_of,
    positions_and_mask,
    tokens_of,
)
from tests.hybrids.tiny_models import tiny_model

QUICK = {"falcon_h1", "jamba", "lfm2", "minimax", "qwen3_next", "xlstm", "zaya"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]
TOKENS = torch.arange(3, 12)[None].repeat(2, 1)
EXACT = 1e-5
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0, 0, 0]])


@torch.no_grad()
def test_the_backbone_stands_its_hidden_states_at_their_tokens() -> None:
    model = stateful(tiny_model("falcon_h1")).model
    tokens, (positions, mask) = tokens_of(PACKED), positions_and_mask(PACKED)
    given = {"attention_mask": mask, "position_ids": positions, "output_hidden_states": True}
    for more in ({}, {"output_final_state": True}):
        output = model(input_ids=tokens, **given, **more)
        for row, word in enumerate(PACKED):
            for places in places_of(word):
                one = model(input_ids=tokens[row : row + 1, places], use_cache=False, output_hidden_states=True)
                assert relative_error([output.last_hidden_state[row, places]], [one.last_hidden_state[0]]) < EXACT
                for actual, expected in zip(output.hidden_states, one.hidden_states, strict=True):
                    assert relative_error([actual[row, places]], [expected[0]]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["falcon_h1", "xlstm"])
def test_padding_repeats_the_output_of_the_last_real_token(model_type: str) -> None:
    model = stateful(tiny_model(model_type))
    logits = model(input_ids=TOKENS, attention_mask=MASK, output_final_state=True).logits
    assert torch.equal(logits[1, 3], logits[1, 2])
    assert torch.equal(logits[1, 6:], logits[1, 5].expand(3, -1))
    for keep in (1, 4, torch.tensor([3, 8, 0])):
        kept = model(input_ids=TOKENS, attention_mask=MASK, output_final_state=True, logits_to_keep=keep).logits
        expected = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        torch.testing.assert_close(kept, expected)


@torch.no_grad()
def test_generate_without_a_state_stays_the_stock_one() -> None:
    stock = tiny_model("falcon_h1")
    model = stateful(copy.deepcopy(stock))
    mask = MASK.clone()
    mask[1] = 1
    for options in ({}, {"use_cache": False}):
        given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, **options}
        assert torch.equal(model.generate(TOKENS, **given), stock.generate(TOKENS, **given))


@torch.no_grad()
@pytest.mark.thinned(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_loop_by_hand_goes_on_from_padding(model_type: str) -> None:
    model = stateful(tiny_model(model_type))
    cache, mask = cache_argument(model), MASK.clone()
    mask[1] = 1
    padded = {"input_ids": TOKENS, "attention_mask": mask}
    first = model(**padded, use_cache=True)
    whole = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    second = model(input_ids=TOKENS[:, :1], attention_mask=whole, **{cache: first[cache]}).logits[0, 0]
    expected = model(input_ids=torch.cat([TOKENS[:1, 2:], TOKENS[:1, :1]], dim=1), use_cache=False).logits[0]
    assert relative_error([first.logits[0, 2:], second], [expected[:-1], expected[-1]]) < EXACT


@torch.no_grad()
def test_chosen_hidden_states_come_back_alone() -> None:
    model = stateful(tiny_model("qwen3_next"))
    chosen = model(input_ids=TOKENS, attention_mask=MASK, output_hidden_states=[0, 2]).hidden_states
    every = model(input_ids=TOKENS, attention_mask=MASK, output_hidden_states=True).hidden_states
    for one, other in zip(chosen, every, strict=False):
        assert one is None or torch.equal(one, other)
    assert sum(one is not None for one in chosen) == 2


@torch.no_grad()
def test_other_heads_get_exact_hidden_states_and_take_no_states_with_padding() -> None:
    model = stateful(AutoModelForSequenceClassification.from_config(tiny_model("qwen3_next").config).eval())
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    output = model(TOKENS, attention_mask=mask)
    assert relative_error([output.logits[1:]], [model(TOKENS[1:, 3:]).logits]) < EXACT
    with pytest.raises(ValueError, match="not a language model"):
        model(TOKENS, attention_mask=mask, output_final_state=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": TOKENS, "logits_to_keep": 1}, "labels need all logits"),
        ({"token_type_ids": torch.zeros_like(TOKENS)}, "token_type_ids"),
        ({"position_ids": torch.arange(9)[None]}, "must count the real tokens of each sequence from 0"),
        ({"attention_mask": 2 * MASK}, "1 at real tokens and 0 at padding"),
        ({"attention_mask": MASK[:, 1:]}, "must have the shape of the tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_moved_is_refused(change: dict[str, Any], message: str) -> None:
    model = stateful(tiny_model("falcon_h1"))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": TOKENS, "attention_mask": MASK, "output_final_state": True} | change)


def test_a_layer_that_reads_on_over_padding_is_found() -> None:
    model = with_stock_mixers(stateful(tiny_model("kimi_linear")))
    with pytest.raises(ValueError, match=r"mixers of layers \[0, 2\] of KimiLinear.* would read the padding"):
        model(input_ids=TOKENS, attention_mask=MASK, output_final_state=True)
