"""Every form of packed rows: wrapped models give what each sequence gives alone, or refuse."""

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
    WINDOW,
    gradients,
    kept,
    masked,
    parts,
    random_state,
    random_tokens,
    relative_error,
    state_of_stock_cache,
    weighted_sum,
    windowed,
)
from tests.hybrids.padded_rows import alone, leaves_of, positions_and_mask, real_of, tokens_of
from tests.hybrids.support import TOLERANCE
from tests.hybrids.support import TOLERANCE_OF_ROWS as EXACT
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.packing_forms import PADDED, WHOLE, forms_of, places_of, wrong_forms

QUICK = {"falcon_h1", "qwen3_5_text", "qwen3_next"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_sequences_give_what_they_give_alone(model_type: str, words: list[str]) -> None:
    """Logits, final states, and gradients with respect to embeddings, initial states and parameters, in one form; all
    forms give the same."""
    model = stateful(tiny_model(model_type)).train()
    embeds, state = leaves_of(model, words)
    leaves, real = [embeds, *parts(state), *model.parameters()], real_of(words)[..., None]
    logits, final = alone(model, embeds, state, words)
    expected, first = [logits, *parts(final)], list[Any]()
    for form, given in forms_of(words).items():
        output = model(inputs_embeds=embeds, initial_state=state, output_final_state=True, **given)
        actual = [output.logits * real, *parts(output.final_state)]
        if not first:
            first = actual
            pairs = ([*x, *gradients(weighted_sum(x), leaves)] for x in (actual, expected))
            assert relative_error(*pairs) < EXACT
        assert all(map(torch.equal, actual, first)), form


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
            assert relative_error([actual], [expected]) < EXACT, form
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


TEXTS = [
    "aaaaabbbbbbbccccccccdddd",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "..aa.bbb..ccddddddddeee.",
    "......................aa",
    "..................abcccd",
    "aaaaaaaaabbbbbbbbbbbbbbb",
    "a.......................",
    "aa.a..aaa......a.a..aaa.",
]
EVEN = ["aaabbbbbbccccccddddddeee"] * 2  # in pieces of 6, all have 3 tokens: nothing stops before padding
AT_ONCE = {"falcon_h1", "jamba", "lfm2", "lfm3", "zaya"}
HYBRIDS = sorted({*SUPPORTED_TYPES} - {"falcon_mamba", "mamba", "mamba2", "xlstm"})


def by_texts(stock: Any, model: Any, embeds: Tensor, words: list[str], window: int) -> list[Tensor]:
    """Logits of each text in a call of its own, zero at padding, and the states after the last text of each row."""
    logits, states = embeds.new_zeros(*embeds.shape[:2], stock.config.vocab_size), dict[int, list[Tensor]]()
    for row, places in places_of(words):
        output = masked(stock, embeds[row : row + 1, places], window, use_cache=True)
        logits = logits.index_put((torch.tensor(row), places), output.logits[0])
        states[row] = state_of_stock_cache(model, getattr(output, cache_argument(model)))
    return [logits, *map(torch.cat, zip(*(states[row] for row in range(len(words))), strict=True))]


def by_pieces(model: Any, cache: Any, embeds: Tensor, words: list[str], lengths: list[int]) -> list[Tensor]:
    """The same from packed rows in pieces, one call for each, with states and attention cache carried."""
    state, logits = None, []
    pieces = (x.split(lengths, dim=1) for x in (embeds, *positions_and_mask(words)))
    for piece, positions, mask in zip(*pieces, strict=True):
        given = {"position_ids": positions, "attention_mask": mask, "initial_state": state, "attention_cache": cache}
        output = model(inputs_embeds=piece, **given)
        state = output.final_state
        logits.append(output.logits * mask[..., None])
    return [torch.cat(logits, dim=1), *parts(output.final_state)]


@pytest.mark.parametrize("window", [1, WINDOW, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in AT_ONCE else [pytest.mark.slow]) for x in HYBRIDS])
def test_pieces_of_packed_rows_go_on_with_the_keys_of_their_own_text(name: str, window: int) -> None:
    """The last text of each row goes on in the next piece, beside texts that begin there."""
    exact = name in ("lfm2", "lfm3")  # others have float32 inside
    words, lengths = TEXTS, [6, 7, 1, 2, 5, 3]
    stock, model = (one.to(torch.float64 if exact else torch.float32) for one in windowed(name, window))
    cache, found = model.new_attention_cache(), []
    for owner in (stock, model):
        embeds = owner.get_input_embeddings()(random_tokens(len(words), 24)).detach().requires_grad_()
        if owner is stock:
            results = by_texts(stock, model, embeds, words, window)
        else:
            results = by_pieces(model, cache, embeds, words, lengths)
        found.append((results, gradients(weighted_sum(results), [embeds, *owner.parameters()])))
    (expected, slopes), (actual, own_slopes) = found
    assert relative_error(actual, expected) < (1e-12 if exact else EXACT)
    assert relative_error(own_slopes, slopes) < (1e-12 if exact else TOLERANCE)
    assert all(len(keys) == len(words) and keys.shape[2] < window for keys in kept(cache))


@torch.no_grad()
def test_packed_rows_that_are_refused_leave_the_cache_as_it_was() -> None:
    model, tokens, given = windowed("bamba")[1], random_tokens(2, 9), dict[str, Any]()
    given["attention_cache"] = model.new_attention_cache()
    given["initial_state"] = model(tokens, **given).final_state
    before, places = [keys.clone() for keys in kept(given["attention_cache"])], torch.arange(9)[None]
    with pytest.raises(ValueError, match="must count the real tokens of each sequence from 0 or 9"):
        model(tokens, position_ids=places % 4, **given)  # the first sequence begins at position 9
    assert all(map(torch.equal, kept(given["attention_cache"]), before))
