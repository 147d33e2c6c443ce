"""What a hybrid keeps of a text is a value: copies, rows taken and joined, beams, a second turn of a conversation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.models.state_value import concatenate_rows, map_state, take_rows
from tests.hybrids.measures import parts, random_tokens, relative_error
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

QUICK = {"bamba", "jamba", "lfm3", "minimax", "qwen3_next", "xlstm"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SUPPORTED_TYPES]
TOKENS = random_tokens(3, 12, seed=7)
TEXT = TOKENS[:2]
MASK = torch.tensor([[0] * 4 + [1] * 8, [1] * 12, [1, 0, 0] + [0] * 9])
"""Rows of 8, 12 and 1 tokens."""
GREEDY: dict[str, Any] = {
    "max_new_tokens": 5,
    "do_sample": False,
    "eos_token_id": None,
    "suppress_tokens": [0],  # padding, if a text has it and no mask
}
TOLERANCE = 1e-5


def read(model: Any, mask: Tensor = MASK, tokens: Tensor = TOKENS) -> tuple[Any, HybridCache]:
    """A state, and the keys and values of the same text; the second may be without any."""
    cache = model.new_attention_cache()
    return model(tokens, attention_mask=mask, attention_cache=cache, output_final_state=True).final_state, cache


def contents(state: Any, cache: Any) -> list[Tensor]:
    """Copies of all tensors of a value."""
    layers = [] if cache is None else cache.layers
    return [
        x.detach().clone() for x in (*parts(state), *(y for layer in layers for pair in layer.parts for y in pair))
    ]


def after(model: Any, state: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits of the next tokens; the cache stays as it is."""
    cache = None if cache is None else copy.copy(cache)
    return model(tokens, initial_state=state, attention_cache=cache).logits  # type: ignore[no-any-return]


@pytest.mark.thinned(5)
@torch.no_grad()
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("model_type", TYPES)
def test_rows_of_values_go_on_as_each_alone(model_type: str, window: int | None) -> None:
    model: Any = stateful(tiny_model(model_type))
    if window is not None and not model.attends:
        pytest.skip("no attention")
    model = stateful(model, attention_window=window)
    more = random_tokens(3, 3, seed=8)
    state, cache = read(model)
    before = contents(state, cache)
    expected = [
        model(torch.cat([TOKENS[row][MASK[row].bool()], more[row]])[None], use_cache=False).logits[0, -3:]
        for row in range(3)
    ]

    def check(found: Tensor, *rows: int) -> None:
        assert relative_error([found], [torch.stack([expected[row] for row in rows])]) < TOLERANCE

    check(after(model, state, cache, more), 0, 1, 2)
    order = torch.tensor([2, 0, 0, 1])
    chosen = take_rows(state, order)
    if cache is None:
        return check(after(model, chosen, None, more[order]), 2, 0, 0, 1)
    check(after(model, chosen, cache.taken(order), more[order]), 2, 0, 0, 1)
    check(after(model, take_rows(state, slice(1, 3)), cache.taken(slice(1, 3)), more[1:]), 1, 2)
    joined = HybridCache.joined([cache.taken(slice(1, 3)), cache.taken(slice(0, 1))])
    states = concatenate_rows([take_rows(state, slice(1, 3)), take_rows(state, slice(0, 1))])
    check(after(model, states, joined, more[[1, 2, 0]]), 1, 2, 0)
    whole = model.cache_from_state(state, cache)
    whole.reorder_cache(order)
    check(model(more[order], **{cache_argument(model): whole}).logits, 2, 0, 0, 1)
    start = {"initial_state": state, "attention_cache": cache}
    for beams in (1, 2):
        generated = model.generate(more[:, :1], **start, **GREEDY, num_beams=beams)
        for row in range(3):
            text = torch.cat([TOKENS[row][MASK[row].bool()], more[row, :1]])[None]
            assert torch.equal(generated[row], model.generate(text, **GREEDY, num_beams=beams)[0, -6:]), (row, beams)
    assert all(map(torch.equal, contents(state, cache), before))
    assert cache.columns <= 12
    assert cache.get_seq_length() == 12


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_a_copy_is_a_value_of_its_own(model_type: str) -> None:
    model: Any = stateful(tiny_model(model_type))
    name, text = cache_argument(model), TOKENS[:2]
    cache = model(text[:, :7], use_cache=True)[name]
    branches = [copy.copy(cache), copy.deepcopy(cache), cache]
    rests = [random_tokens(2, 4, seed=seed) for seed in (1, 2, 3)]
    for branch, rest in zip(branches, rests, strict=True):
        for chunk in (rest[:, :1], rest[:, 1:]):
            logits = model(chunk, **{name: branch}).logits
        expected = model(torch.cat([text[:, :7], rest], 1), use_cache=False).logits[:, -3:]
        assert relative_error([logits], [expected]) < TOLERANCE
        assert branch.get_seq_length() == 11
    cache.reset()
    assert (cache.get_seq_length(), cache.columns) == (0, 0)
    assert relative_error([model(text, **{name: cache}).logits], [model(text, use_cache=False).logits]) < TOLERANCE


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(model_type: str, padded: bool) -> None:
    model: Any = stateful(tiny_model(model_type))
    name = cache_argument(model)
    prompt, mask = TOKENS[:2], {"attention_mask": MASK[:2]} if padded else {}
    first = model.generate(prompt, **mask, **GREEDY, return_dict_in_generate=True)
    cache = next(x for x in first.values() if isinstance(x, HybridCache))  # releases name it otherwise
    text = torch.cat([first.sequences, random_tokens(2, 3, seed=9)], dim=1)
    if padded:
        mask = {"attention_mask": torch.cat([MASK[:2], torch.ones(2, text.shape[1] - 12).long()], dim=1)}
    found = model.generate(text, **mask, **GREEDY, **{name: cache})
    assert torch.equal(found, model.generate(text, **mask, **GREEDY))
    assert torch.equal(found, model.generate(text, **mask, **GREEDY, use_cache=False))
    assert cache.get_seq_length() == found.shape[1] - 1


@pytest.mark.parametrize("model_type", TYPES)
def test_no_argument_changes(model_type: str) -> None:
    model: Any = stateful(tiny_model(model_type))
    state, cache = read(model)
    state = map_state(lambda part: part.detach().requires_grad_(), state)
    before, ids = contents(state, cache), random_tokens(3, 2, seed=8)
    start = {"initial_state": state} | ({} if cache is None else {"attention_cache": cache})
    for tokens in (ids, ids[:, :1]):
        for how in ({}, {"num_beams": 2}):
            model.generate(tokens, **start, **GREEDY, **how)
        model(tokens, initial_state=state)
        model(tokens, **{cache_argument(model): model.cache_from_state(state, cache)})
        assert all(map(torch.equal, contents(state, cache), before))
        assert cache is None or cache.get_seq_length() == 12


@pytest.mark.parametrize("positional", [False, True])
def test_a_generation_config_is_honored_with_a_state(positional: bool) -> None:
    model: Any = stateful(tiny_model("lfm2"))
    config, start = GenerationConfig(**GREEDY), {"initial_state": model.zero_state(2)}
    arguments = ((config,), {}) if positional else ((), {"generation_config": config})
    found = model.generate(TEXT, *arguments[0], **arguments[1], **start)
    assert torch.equal(found, model.generate(TEXT, **GREEDY, **start))
    settings = GREEDY | {"cache_implementation": "dynamic"}
    assert torch.equal(model.generate(TEXT, GenerationConfig(**settings)), model.generate(TEXT, **GREEDY))


@torch.no_grad()
def test_a_full_cache_goes_on_as_attention_cache() -> None:
    model: Any = stateful(tiny_model("falcon_h1"))
    cache = model(TEXT)[cache_argument(model)]
    model(TEXT[:, :3], initial_state=cache.state, attention_cache=cache)
    logits = model(TEXT, **{cache_argument(model): cache}).logits
    whole = model(torch.cat([TEXT, TEXT[:, :3], TEXT], 1), use_cache=False).logits
    assert relative_error([logits], [whole[:, 15:]]) < TOLERANCE
