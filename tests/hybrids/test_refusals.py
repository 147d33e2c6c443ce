"""What a wrapped model refuses, with what to do: models, calls, caches, rows, windows, generation."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, DynamicCache, GenerationConfig
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.models.state_value import LayerState
from tests.hybrids.measures import random_tokens, relative_error, with_checkpointing, with_stock_mixers
from tests.hybrids.tiny_models import tiny_model
from tests.llamas import tiny_llama
from tests.row_forms import WHOLE, forms_of, wrong_forms

X, Y = random_tokens(2, 9), random_tokens(2, 3, seed=2)
LEFT = torch.ones_like(X)
LEFT[0, :3] = 0
RIGHT, PACKED, COUNTED = LEFT.flip(1), torch.tensor([[0, 1, 2] * 3] * 2), torch.arange(9)[None]
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
BY_LENGTH = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}


def wrapped(model_type: str, **changes: Any) -> Any:
    return stateful(tiny_model(model_type, **changes))


def mamba() -> Any:
    return wrapped("mamba")


def classifier() -> Any:
    return stateful(AutoModelForSequenceClassification.from_config(tiny_model("qwen3_next").config).eval())


def keys_of(model: Any) -> Any:
    cache = model.new_attention_cache()
    model(X, attention_cache=cache)
    return cache


def called(model: Any, tokens: Any, cache: Any, **more: Any) -> Any:
    return model(tokens, **{cache_argument(model): cache}, **more)


def cached(model: Any, **more: Any) -> Any:
    return model(X, **more)[cache_argument(model)]


def with_config(model: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def learned(model: Any) -> Any:
    model.add_learned_state("one")
    return model


def read(model: Any, **inputs: Any) -> Any:
    return model(**{"input_ids": X, "output_final_state": True} | inputs)


def layer(model: Any, part: str, change: Callable[[Any], Any]) -> Any:
    first, *rest = model.zero_state(2)
    return (LayerState(**first._asdict() | {part: change(getattr(first, part))}), *rest)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no recurrent type": (lambda: stateful(tiny_llama()), "'llama' is no supported recurrent type; those are ba"),
    "no model of Transformers": (lambda: stateful(torch.nn.Linear(1, 1)), "takes a model of Transformers, got Linear"),  # type: ignore[arg-type]
    "an adapter": (
        lambda: stateful(get_peft_model(tiny_model("falcon_h1"), LoraConfig(target_modules=["in_proj"]))),  # type: ignore[arg-type]
        "before get_peft_model",
    ),
    "no states": (lambda: wrapped("lfm2", layer_types=["full_attention"] * 3), "has no recurrent layers"),
    "a window without attention": (lambda: stateful(mamba(), 4), "Mamba.* limits the attention of hybrids"),
    "rotary embeddings": (lambda: stateful(tiny_model("bamba", **BY_LENGTH), 4), "change with the length of the text"),
    **{
        f"a window of {window!r}": (
            lambda window=window: stateful(tiny_model("bamba"), window),
            "attention_window must be a number of tokens of at least 1",
        )
        for window in (0, True, 2.0, "5.0")
    },
    "an adapter read past": (
        lambda: read(get_peft_model(wrapped("falcon_mamba"), LoraConfig(r=2, target_modules=["dt_proj"]))),
        "adapter on dt_proj of layer 0 has no effect, since FalconMambaMixer of Tra",
    ),
    "repeated layers": (
        lambda: read(
            get_peft_model(
                wrapped("bamba"), LoraConfig(target_modules=["in_proj"], layer_replication=[(0, 2), (1, 3)])
            )
        ),
        "layer_replication of PEFT",
    ),
    "a learned state of another checkpoint": (
        lambda: stateful(with_config(tiny_model("mamba"), learned_states=learned(mamba()).config.learned_states)),
        r"names the learned states .*, but the model has .*: load the checkpoint with",
    ),
    "an unknown attention": (
        lambda: read(with_config(stateful(tiny_model("bamba"), 4), _attn_implementation="unknown")),
        "this attn_implementation: choose",
    ),
    "a window by hand": (lambda: read(with_config(wrapped("bamba"), attention_window=-2)), "at least 1"),
    "a mask of pairs": (
        lambda: stateful(tiny_model("bamba"), 4)(X, attention_mask=torch.ones(2, 1, 9, 9).bool()),
        "attention_mask must have the shape of the tokens",
    ),
    "another head with padding": (lambda: read(classifier(), attention_mask=LEFT), "another head with padding"),
    "another head, several": (lambda: classifier()(X, position_ids=PACKED), "classification of rows with several"),
    "stock mixers": (
        lambda: read(with_stock_mixers(wrapped("kimi_linear")), attention_mask=RIGHT),
        "stock mixers that read over padding",
    ),
    "a row of experts without tokens": (
        lambda: read(wrapped("qwen3_next"), attention_mask=LEFT * torch.tensor([[1], [0]]), output_router_logits=True),
        "without a real token with output_router_logits",
    ),
    "experts and unequal rows": (
        lambda: called(m := wrapped("qwen3_next"), Y, cached(m, attention_mask=LEFT), output_router_logits=True),
        "unequal length with output_router_logits",
    ),
}
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "forgetting": (lambda m: read(with_config(m, forgetting={"window": 4})), "forgetting: families"),
    "use_cache": (lambda m: read(m, use_cache=True), "states with use_cache: give attention_cache"),
    "a cache": (lambda m: read(m, past_key_values=cached(m)), "states with use_cache: give attention_cache"),
    "later positions": (lambda m: read(m, position_ids=COUNTED + 3), "must count the real tokens"),
    "positions at padding": (lambda m: read(m, position_ids=COUNTED, attention_mask=LEFT), "must count the real"),
    "planes": (lambda m: read(m, position_ids=torch.arange(54).view(3, 2, 9)), "of the shape of the tokens"),
    "no ids": (lambda m: read(m, input_ids=None), "exactly one of input_ids"),
    "no tokens": (lambda m: read(m, input_ids=X[:, :0]), "give at least one of each"),
    "names": (lambda m: called(m, X, Cache(layers=[]), cache_params=Cache(layers=[])), "two names of a cache"),
    "segment_ids": (lambda m: m(X, segment_ids=COUNTED), "segment_ids.* are not read"),
    "a group": (lambda m: m(X, sequence_group=object()), "sequence_group: processes share rows of families"),
    "tree": (lambda m: read(m, tree_cu_seqlens_q=COUNTED), "tree_cu_seqlens_q.* are not read"),
    "few logits": (lambda m: read(m, attention_mask=LEFT, labels=X, logits_to_keep=1), "logits_to_keep with labels"),
    "labels of one row": (
        lambda m: read(m, attention_mask=LEFT, labels=X[:1]),
        "labels must have shape",
    ),
    "token types": (
        lambda m: read(m, attention_mask=LEFT, token_type_ids=0 * X),
        "token_type_ids.* cannot be used",
    ),
    "attentions": (
        lambda m: read(eager(m), attention_mask=LEFT, output_attentions=True),
        "which cannot be moved back",
    ),
    "layers": (lambda m: m(X, initial_state=m.zero_state(2)[:2]), "2 layers, the model has 3"),
    "shape": (
        lambda m: m(X, initial_state=layer(m, "recurrent", lambda x: x[:, :1])),
        "must be a tensor",
    ),
    "nan": (lambda m: m(X, initial_state=layer(m, "recurrent", lambda x: x * torch.nan)), "has NaN"),
    "rows": (lambda m: m(X, initial_state=m.zero_state(3)), "must be a tensor"),
    "keys without a state": (
        lambda m: m(X, attention_cache=keys_of(m)),
        "with no initial_state: give the",
    ),
    "keys, generate": (
        lambda m: m.generate(X, attention_cache=keys_of(m)),
        "with no initial_state: give the",
    ),
    "keys of another": (
        lambda m: m(X, attention_cache=wrapped("nemotron_h").new_attention_cache()),
        "must be made by",
    ),
    "no keys": (lambda m: m.cache_from_state(m.zero_state(2), "x"), "must be made by"),
    "keys alone": (lambda m: called(m, Y, keys_of(m)), "without a state: give it as attention_cache"),
    "rows of a call": (lambda m: called(m, random_tokens(4, 3), cached(m)), "has 2 rows, not 4"),
    "rows of keys": (
        lambda m: m(Y[:1], attention_cache=keys_of(m), initial_state=m.zero_state(1)),
        "not 1",
    ),
    "rows of a state": (lambda m: m.cache_from_state(m.zero_state(3), keys_of(m)), "has 2 rows, not 3"),
    "rows of prompts": (
        lambda m: m.generate(random_tokens(4, 12), **{cache_argument(m): cached(m)}, **GREEDY),
        "has 2 rows, not 4",
    ),
    "packed with a cache": (lambda m: m(X, position_ids=PACKED, use_cache=True), "use_cache with several sequences"),
    "reentrant": (lambda m: torch.enable_grad()(read)(with_checkpointing(m, reentrant=True)), "use_reentrant"),
    "stock": (lambda m: called(m, X, DynamicCache(config=m.config)), "a stock cache: give one that a call"),
    "static": (lambda m: m.generate(X, cache_implementation="static", **GREEDY), "cache_implementation: the cache is"),
    "lookup": (lambda m: m.generate(X, prompt_lookup_num_tokens=3), "cannot be cropped"),
    "chunks": (lambda m: m.generate(X, prefill_chunk_size=3, **GREEDY), "prefill_chunk_size: read the beginning of"),
    "nothing new": (
        lambda m: m.generate(
            torch.cat([X, Y], 1),
            attention_mask=torch.cat([LEFT, torch.tensor([[0] * 3, [1] * 3])], 1),
            **{cache_argument(m): cached(m, attention_mask=LEFT)},
            **GREEDY,
        ),
        "a row without a new token",
    ),
    "an empty prompt": (
        lambda m: m.generate(X, attention_mask=LEFT * torch.tensor([[1], [0]]), **GREEDY),
        "a row without a new token",
    ),
    "no cache": (lambda m: m.generate(X, initial_state=m.zero_state(2), use_cache=False), "use_cache=False: gen"),
    "no cache, by a config": (
        lambda m: m.generate(X, GenerationConfig(use_cache=False), initial_state=m.zero_state(2)),
        "use_cache=False: generate carries it",
    ),
    "no cache, learned": (lambda m: learned(m).generate(X, use_cache=False), "use_cache=False: generate carries it"),
    "no prompt": (lambda m: m.generate(), "no prompt: give a prompt"),
    "state and cache": (
        lambda m: m.generate(X, initial_state=m.zero_state(2), **{cache_argument(m): cached(m)}),
        "states with use_cache",
    ),
    "rows of a prompt": (lambda m: m.generate(X[:1], initial_state=m.zero_state(2)), "must be a tensor"),
    **{
        f"prompts in a row, {form}, {start}": (
            lambda m, inputs=inputs, start=start: m.generate(
                random_tokens(2, 17), **inputs, **GREEDY, **({"initial_state": m.zero_state(2)} if start else {})
            ),
            "one sequence per row",
        )
        for form, inputs in forms_of(WHOLE).items()
        for start in (False, True)
    },
    **{
        f"form: {form}": (lambda m, rows=rows: read(m, input_ids=random_tokens(2, 17), **rows), re.escape(message))
        for form, (rows, message) in wrong_forms(WHOLE).items()
    },
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_have_it_refuses_it(case: str) -> None:
    call, message = MODELS[case]
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call()


@pytest.fixture(scope="module")
def stock() -> Any:
    return tiny_model("falcon_h1")


@torch.no_grad()
@pytest.mark.parametrize("case", CALLS)
def test_what_does_not_fit_is_refused(stock: Any, case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(ValueError, match=message):
        call(stateful(copy.deepcopy(stock)))


@torch.no_grad()
def test_a_refused_call_leaves_the_cache(stock: Any) -> None:
    model = stateful(copy.deepcopy(stock))
    cache = cached(model)
    for tokens, inputs in (
        (random_tokens(4, 3), {}),
        (X, {"position_ids": PACKED}),
        (X, {"position_ids": COUNTED}),
    ):
        with pytest.raises(ValueError, match=r"not 4|several sequences|must count"):
            called(model, tokens, cache, **inputs)
    logits = called(model, Y, cache).logits
    assert relative_error([logits], [model(torch.cat([X, Y], 1), use_cache=False).logits[:, 9:]]) < 1e-5


def test_a_forward_on_the_object_is_refused() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model("falcon_h1")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    with pytest.raises(ValueError, match="hooks of accelerate"):
        stateful(model)
    assert type(model) is type(tiny_model("falcon_h1"))


@torch.no_grad()
def test_a_cache_of_another_window_is_refused() -> None:
    model = stateful(tiny_model("bamba"), attention_window=4)
    start: Any = {"initial_state": model.zero_state(2), "attention_cache": model.new_attention_cache()}
    model(X, **start)
    for window in (3, "none"):
        stateful(model, attention_window=window)
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=r"keeps the keys of a window of 4 tokens, but attention_window"):
                call(Y, **start)
