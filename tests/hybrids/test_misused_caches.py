"""Caches, padding and calls that do not fit: refused, with what to do, and what was given stays as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from tests.hybrids.measures import pair, random_tokens, relative_error
from tests.hybrids.tiny_models import tiny_model

X, Y = random_tokens(2, 8), random_tokens(2, 3, seed=2)
LEFT = torch.ones_like(X)
LEFT[0, :3] = 0
RIGHT, PACKED = LEFT.flip(1), torch.tensor([[0, 1, 2, 3] * 2] * 2)
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Any:
    return pair("falcon_h1")[1]


def keys_of(model: Any) -> Any:
    cache = model.new_attention_cache()
    model(X, attention_cache=cache)
    return cache


def called(model: Any, tokens: Any, cache: Any, **more: Any) -> Any:
    return model(tokens, **{cache_argument(model): cache}, **more)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "static, right padding": (
        lambda m: m.generate(X, attention_mask=RIGHT, cache_implementation="static", **GREEDY),
        "stock cache takes padding before the tokens only",
    ),
    "stock, right padding": (
        lambda m: called(m, X, DynamicCache(config=m.config), attention_mask=RIGHT),
        "stock cache takes padding before the tokens only",
    ),
    "stock, packed": (
        lambda m: called(m, X, DynamicCache(config=m.config), position_ids=PACKED),
        "Several sequences in a row cannot be read with a cache",
    ),
    "chunks, right padding": (
        lambda m: m.generate(X, attention_mask=RIGHT, prefill_chunk_size=3, **GREEDY),
        "prefill_chunk_size needs prompts padded on the left",
    ),
    "nothing new": (
        lambda m: m.generate(
            torch.cat([X, Y], 1),
            attention_mask=torch.cat([LEFT, torch.tensor([[0] * 3, [1] * 3])], 1),
            **{cache_argument(m): m(X, attention_mask=LEFT)[cache_argument(m)]},
            **GREEDY,
        ),
        "A row has no new token",
    ),
    "rows of a call": (lambda m: called(m, random_tokens(4, 3), m(X)[cache_argument(m)]), "has 2 rows, the call 4"),
    "rows of keys": (lambda m: m(Y[:1], attention_cache=keys_of(m), initial_state=m.zero_state(1)), "has 2 rows"),
    "rows of prompts": (
        lambda m: m.generate(random_tokens(4, 9), **{cache_argument(m): m(X)[cache_argument(m)]}, **GREEDY),
        "has 2 rows, the prompts 4",
    ),
    "keys alone": (lambda m: called(m, Y, keys_of(m)), "without a state: give it as attention_cache"),
    "no cache": (lambda m: m.cache_from_state(m.zero_state(2), "x"), r"made by new_attention_cache\(\)"),
    "rows of a state": (lambda m: m.cache_from_state(m.zero_state(3), keys_of(m)), "has 2 rows, the state 3"),
}


@torch.no_grad()
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(model: Any, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(model)


@torch.no_grad()
def test_a_refused_call_leaves_the_cache(model: Any) -> None:
    cache = model(X)[cache_argument(model)]
    with pytest.raises(ValueError, match="has 2 rows, the call 4"):
        called(model, random_tokens(4, 3), cache)
    logits = called(model, Y, cache).logits
    assert relative_error([logits], [model(torch.cat([X, Y], 1), use_cache=False).logits[:, 8:]]) < 1e-5


@torch.no_grad()
def test_a_full_cache_goes_on_as_attention_cache(model: Any) -> None:
    cache = model(X)[cache_argument(model)]
    model(Y, initial_state=cache.state, attention_cache=cache)
    logits = called(model, X, cache).logits
    assert relative_error([logits], [model(torch.cat([X, Y, X], 1), use_cache=False).logits[:, 11:]]) < 1e-5


@torch.no_grad()
def test_a_dynamic_cache_may_be_asked_for(model: Any) -> None:
    expected = model.generate(X, **GREEDY)
    assert torch.equal(model.generate(X, cache_implementation="dynamic", **GREEDY), expected)
    assert torch.equal(model.generate(X, GenerationConfig(cache_implementation="dynamic", **GREEDY)), expected)


@torch.no_grad()
def test_the_class_of_a_wrapped_model_loads_one(model: Any, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(X).logits, model(X).logits)
    assert torch.equal(loaded.generate(X, **GREEDY), model.generate(X, **GREEDY))
    assert loaded.base_model(X, output_final_state=True).final_state is not None


@torch.no_grad()
def test_a_loss_of_experts_goes_with_padding_in_evaluation() -> None:
    stock, model = pair("qwen3_next")
    labels = X.masked_fill(LEFT.cumsum(1) <= 1, -100)  # nothing is before the first token of a row
    given = {"attention_mask": LEFT, "output_router_logits": True, "labels": labels}
    expected = stock(X, use_cache=False, **given).loss
    torch.testing.assert_close(model(X, **given).loss, expected, rtol=1e-5, atol=1e-6)
    cache = model(X, attention_mask=LEFT)[cache_argument(model)]
    with pytest.raises(ValueError, match="does not take a cache of rows of unequal length"):
        called(model, Y, cache, output_router_logits=True)


@torch.no_grad()
def test_xlstm_takes_padding_in_float16() -> None:
    model = stateful(tiny_model("xlstm").half())
    full = stateful(copy.deepcopy(model).float())
    found = model(X, attention_mask=LEFT, output_final_state=True).logits.float()
    assert relative_error([found], [full(X, attention_mask=LEFT, output_final_state=True).logits]) < 0.02
