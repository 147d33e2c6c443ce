"""Padding and packed rows in every form: wrapped models give what each sequence gives alone, or refuse."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import (
    kept,
    parts,
    random_state,
    random_tokens,
    relative_error,
    windowed,
    with_stock_mixers,
)
from tests.hybrids.padded_rows import PACKED, positions_and_mask, real_of, tokens_of
from tests.hybrids.tiny_models import tiny_model
from tests.row_forms import PADDED, WHOLE, forms_of, places_of, wrong_forms
from tests.versions import SINCE_5_23

QUICK = ["falcon_h1", "minimax", "qwen3_next", "xlstm", "zaya"]
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


@torch.no_grad()
@pytest.mark.parametrize("model_type", QUICK)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_all_forms_give_the_same(model_type: str, words: list[str]) -> None:
    model, first = stateful(tiny_model(model_type)), list[Tensor]()
    state, real = random_state(model, len(words)), real_of(words)[..., None]
    for form, given in forms_of(words).items():
        output = model(tokens_of(words), initial_state=state, **given)
        found = [output.logits * real, *parts(output.final_state)]
        first = first or found
        assert all(map(torch.equal, found, first)), form


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_calls_without_states_and_backbones_read_every_form(model_type: str, words: list[str]) -> None:
    """The stock models would read on from one sequence to the next, and from padding on the left."""
    model, tokens = stateful(tiny_model(model_type)), tokens_of(words)
    for run in (model, model.base_model):
        expected = torch.cat([run(tokens[row : row + 1, p], use_cache=False)[0][0] for row, p in places_of(words)])
        for form, given in forms_of(words).items():
            output = run(tokens, **given)
            assert getattr(output, "final_state", None) is None
            actual = torch.cat([output[0][row, places] for row, places in places_of(words)])
            assert relative_error([actual], [expected]) < 1e-5, form
            with pytest.raises(ValueError, match=r"with a cache|before the prompts|after padding"):
                run(tokens, use_cache=True, **given)
        assert torch.equal(run(tokens, return_dict=False, **given)[0], output[0])


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_forms_of_one_sequence_change_nothing(model_type: str) -> None:
    model, words = stateful(tiny_model(model_type)), ["a" * 9] * 2
    tokens = tokens_of(words)
    expected = model(tokens, use_cache=False).logits
    for form, given in forms_of(words).items():
        for more in ({}, {"output_final_state": True}):
            torch.testing.assert_close(model(tokens, **given, **more).logits, expected, msg=form)


@pytest.mark.parametrize("form", wrong_forms(WHOLE))
@pytest.mark.parametrize("more", [{}, {"output_final_state": True}], ids=["stock", "states"])
def test_what_no_recurrent_model_can_follow_is_refused(form: str, more: dict[str, Any]) -> None:
    given, message = wrong_forms(WHOLE)[form]
    model = stateful(tiny_model("qwen3_5_text"))
    with pytest.raises(ValueError, match=re.escape(message)):
        model(tokens_of(WHOLE), **given, **more)


@pytest.mark.parametrize("name", ["segment_ids", "tree_cu_seqlens_q", "seq_lengths"])
def test_other_names_that_stock_models_would_ignore_are_refused(name: str) -> None:
    model = stateful(tiny_model("qwen3_next"))
    for more in ({}, {"output_final_state": True}):
        with pytest.raises(ValueError, match=f"{name}.* are not read"):
            model(tokens_of(WHOLE), **{name: torch.zeros(2, 17)}, **more)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_5_text"])
def test_generate_takes_one_sequence_in_a_row(model_type: str) -> None:
    model, tokens = stateful(tiny_model(model_type)), tokens_of(WHOLE)
    one: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    for given in forms_of(WHOLE).values():
        for start in ({}, {"initial_state": random_state(model, 2)}, {"cache_implementation": "static"}):
            with pytest.raises(ValueError, match="one sequence per row"):
                model.generate(tokens, **given, **one, **start)
    counted = torch.arange(17).repeat(4, 2, 1)
    assert torch.equal(model.generate(tokens, position_ids=counted, **one), model.generate(tokens, **one))


@torch.no_grad()
def test_sequence_classification_takes_one_sequence_in_a_row() -> None:
    model = stateful(AutoModelForSequenceClassification.from_config(tiny_model("qwen3_next").config).eval())
    tokens = tokens_of(WHOLE)
    for given in forms_of(WHOLE).values():
        with pytest.raises(ValueError, match="takes one sequence per row"):
            model(tokens, **given)


@torch.no_grad()
def test_packed_rows_that_are_refused_leave_the_cache_as_it_was() -> None:
    model, tokens, given = windowed("bamba")[1], random_tokens(2, 9), dict[str, Any]()
    given["attention_cache"] = model.new_attention_cache()
    given["initial_state"] = model(tokens, **given).final_state
    before, places = [keys.clone() for keys in kept(given["attention_cache"])], torch.arange(9)[None]
    with pytest.raises(ValueError, match="must count the real tokens of each sequence from 0 or 9"):
        model(tokens, position_ids=places % 4, **given)  # the first sequence begins at position 9
    assert all(map(torch.equal, kept(given["attention_cache"]), before))


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
        for row, places in places_of(PACKED):
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


@pytest.mark.skipif(not SINCE_5_23, reason="older Transformers choose hidden states otherwise")
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
