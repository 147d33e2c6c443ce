"""Chunks of a hybrid's rows have the loss and the gradients of whole rows; windows those of their definition.

The truth of chunks is the stock model, which reads each sequence alone and at once; from a learned state, or from a
state, keys and values, the wrapped model does. All is computed in float64, also where code names float32, so that
nothing differs but what is wrong. Trainers: test_hybrid_chunks_trained.py.
"""

import copy
import functools
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import map_state
from hf_recurrent_lengthgen.trainers.chunked_backprop import forward_in_chunks
from tests.hybrids.measures import (
    gradients,
    masked,
    parts,
    random_tokens,
    relative_error,
    weighted_sum,
    with_checkpointing,
)
from tests.hybrids.padded_rows import places_of
from tests.hybrids.test_law import InFloat64
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

TOLERANCE = 1e-11
LFM = "lfm3" if "lfm3" in SUPPORTED_TYPES else "lfm2"  # which Transformers has since 5.23
TYPES = ["falcon_h1", "qwen3_next", LFM, "zamba2"]
"""Mamba-2 beside attention; the delta rule and experts; convolutions and a sliding window; shared attention."""
T, ITEMS = 25, 30
CHUNKS = [1, 3, 7, 16, T - 1, T]  # cut at 1, 2, ...; 2, 5, 8, 11, 13, 16, 19, 22; 6, 12, 18; 12 twice; nowhere
WORDS = {
    "whole": ["a" * T] * 2,
    "padded": ["." * 7 + "a" * 18, "a" * 14 + "." * 11, "..." + "a" * 15 + "." * 7, "." * 24 + "a", "." * 25],
    "packed": [
        "aaaaaabbbbbbcccccccddddee",
        "a" * 12 + "b" * 13,
        "..aaaaaaaaaabbbbbbccccc..",
        "ab" + "c" * 23,
        "a" * T,
    ],
}
LABELLED = {
    "all": lambda row, place: place >= 0,
    "last": lambda row, place: place >= T - 2,
    "one": lambda row, place: (place == 14) & (row == 0),
    "at both ends": lambda row, place: (place < 5) | (place > 20),
    "none": lambda row, place: place < 0,
    "late": lambda row, place: place > 20,
}


def in_float64(model: Any) -> Any:
    """The model, which computes all in float64, also when chunks are computed again."""
    forward = model.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return forward(*args, **kwargs)

    model.forward = wrapped
    return model


@functools.cache
def both(model_type: str, window: int | None = None) -> tuple[Any, Any]:
    """A wrapped model and a stock one of the same weights."""
    with InFloat64():  # in which no parameter is float32
        stock: Any = tiny_model(model_type, dtype=torch.float64).train()
        return in_float64(stateful(copy.deepcopy(stock), attention_window=window)), stock


def batch(form: str, labelled: str = "all") -> dict[str, Tensor]:
    """Rows with a token at each letter of `WORDS`, and its labels."""
    words = WORDS[form]
    ids = random_tokens(len(words), len(words[0]))
    real = torch.tensor([[letter != "." for letter in word] for word in words])
    letters = torch.tensor([[ord(letter) for letter in word] for word in words]).cummax(1).values
    scored = real & LABELLED[labelled](torch.arange(len(words))[:, None], torch.arange(len(words[0])))
    inputs = {"input_ids": ids, "labels": ids.masked_fill(~scored, -100)}
    inputs |= {"attention_mask": real.long()} if not real.all() else {}
    return inputs | ({"seq_idx": letters} if form == "packed" else {})


def read_alone(read: Any, form: str, labelled: str) -> Tensor:
    """The loss of sequences that are read one by one, each from (1, L) to logits."""
    inputs, losses = batch(form, labelled), []
    for row, word in enumerate(WORDS[form]):
        for places in places_of(word):
            targets = inputs["labels"][row, places[1:]]
            logits = read(inputs["input_ids"][row, None, places])[0, :-1]
            losses.append(cross_entropy(logits, targets, reduction="sum"))
    return torch.stack(losses).sum() / ITEMS


def slopes(loss: Tensor, model: Any) -> list[Tensor]:
    return [loss.detach(), *gradients(loss, trained(model))]


def trained(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@functools.cache
def truth(model_type: str, form: str, labelled: str, window: int | None) -> list[Tensor]:
    stock = both(model_type)[1]

    def read(ids: Tensor) -> Tensor:
        output = stock(ids, use_cache=False) if window is None else masked(stock, ids, window, use_cache=False)
        logits: Tensor = output.logits
        return logits

    with InFloat64():
        return slopes(read_alone(read, form, labelled), stock)


def in_chunks(model: Any, inputs: dict[str, Any], chunk: int) -> Any:
    with forward_in_chunks(model, chunk):
        return model(**inputs, num_items_in_batch=ITEMS)


CASES: list[tuple[str, str, int | None]] = [
    *(("whole", labelled, None) for labelled in LABELLED if labelled != "late"),
    *(("whole", "all", window) for window in (1, 5, 100)),
    ("padded", "all", None),
    ("padded", "last", 5),
    ("packed", "all", None),
    ("packed", "all", 1),
    ("packed", "at both ends", 5),
]


@pytest.mark.thinned(97)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("form", "labelled", "window"), CASES)
@pytest.mark.parametrize("model_type", TYPES)
def test_chunks_are_the_rows_of_the_stock_model(
    model_type: str, form: str, labelled: str, window: int | None, chunk: int
) -> None:
    model = both(model_type, window)[0]
    found = slopes(in_chunks(model, batch(form, labelled), chunk).loss, model)
    assert relative_error(found, truth(model_type, form, labelled, window)) < TOLERANCE


@pytest.mark.thinned(9)
@pytest.mark.parametrize("form", ["position_ids", "borders"])
@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_forms_that_say_that_rows_are_one_sequence_each_change_nothing(model_type: str, form: str) -> None:
    inputs, model = batch("whole"), both(model_type)[0]
    borders = {"cu_seq_lens_q": torch.arange(0, inputs["input_ids"].numel() + 1, T), "max_length_q": T}
    inputs |= borders if form == "borders" else {"position_ids": torch.arange(T)[None]}
    found = slopes(in_chunks(model, inputs, 7).loss, model)
    assert relative_error(found, truth(model_type, "whole", "all", None)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_TYPES if name not in TYPES])
def test_chunks_of_every_type_are_the_rows_of_the_stock_model(model_type: str) -> None:
    """Of one form of rows each, in turn."""
    form = [*WORDS][[*SUPPORTED_TYPES].index(model_type) % len(WORDS)]
    model = both(model_type)[0]
    found = slopes(in_chunks(model, batch(form), 7).loss, model)
    assert relative_error(found, truth(model_type, form, "all", None)) < TOLERANCE


@pytest.mark.thinned(23)
@pytest.mark.parametrize("chunk", [1, 7, T])
@pytest.mark.parametrize("form", WORDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_sequences_start_from_the_learned_state_wherever_they_begin(model_type: str, form: str, chunk: int) -> None:
    model, expected = learning(model_type), learned(model_type, form)
    moved = {id(weight) for weight, slope in zip(trained(model), expected[1:], strict=True) if slope.any()}
    assert moved >= {id(weight) for weight in trained(model.learned_states)}
    found = slopes(in_chunks(model, batch(form), chunk).loss, model)
    assert relative_error(found, expected) < TOLERANCE


@functools.cache
def learning(model_type: str) -> Any:
    """A wrapped model with a learned state away from zero."""
    with InFloat64():
        model = in_float64(stateful(tiny_model(model_type, dtype=torch.float64)))
        model.add_learned_state()
    generator = torch.Generator().manual_seed(6)
    for parameter in model.learned_states.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.train()


@functools.cache
def learned(model_type: str, form: str) -> list[Tensor]:
    """The loss of sequences that are read alone from that state, and its gradients."""
    model = learning(model_type)
    with InFloat64():
        return slopes(read_alone(lambda ids: model(ids, use_cache=False).logits, form, "all"), model)


@pytest.mark.parametrize("model_type", ["falcon_h1", LFM])
def test_a_text_before_the_rows_gets_its_gradients(model_type: str) -> None:
    """A call, then chunks from its state, keys and values: the parameters have the gradients of the stock model."""
    model, inputs = both(model_type)[0], batch("whole", "late")
    cache = model.new_attention_cache()
    first = model(inputs["input_ids"][:, :9], output_final_state=True, attention_cache=cache)
    rest = {name: value[:, 9:] for name, value in inputs.items()}
    output = in_chunks(model, rest | {"initial_state": first.final_state, "attention_cache": cache}, 5)
    assert cache.position == T
    expected = truth(model_type, "whole", "late", None)
    assert relative_error(slopes(output.loss, model), expected) < TOLERANCE


def leaves(tensors: Any) -> Any:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


@pytest.mark.thinned(59)
@pytest.mark.parametrize("chunk", [1, 7, T])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("form", WORDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_initial_states_and_keys_get_gradients(model_type: str, form: str, window: int | None, chunk: int) -> None:
    """Of rows that have read unequally many tokens."""
    model, rows = both(model_type, window)[0], batch(form)
    mask = (torch.arange(6) >= torch.arange(len(WORDS[form]))[:, None]).long()
    before = model.new_attention_cache()
    with torch.no_grad():
        state = model(random_tokens(*mask.shape, 8), attention_mask=mask, attention_cache=before).final_state
    state = map_state(lambda part: part.clone().requires_grad_(), state)
    keys = {index: leaves((layer.keys, layer.values)) for index, layer in enumerate(before.layers) if layer.parts}
    starts = [*parts(state), *(x for pair in keys.values() for x in pair if x.numel())]
    found = []
    for size in (T, chunk):
        cache = copy.copy(before).replaced(keys, before.position, before.lengths)
        arguments = rows | {"initial_state": state, "attention_cache": cache}
        output = model(**arguments, num_items_in_batch=ITEMS) if not found else in_chunks(model, arguments, size)
        lengths = torch.full((len(mask),), cache.position) if cache.lengths is None else cache.lengths
        after = [
            keys * (torch.arange(-keys.shape[2], 0) >= -lengths[:, None])[:, None, :, None]  # what is seen
            for keys in (layer.keys for layer in cache.layers if layer.parts)
        ]
        results = [output.loss, *parts(output.final_state), *after]
        found.append([*results, *gradients(weighted_sum(results), [*starts, *trained(model)])])
    assert relative_error(*found) < TOLERANCE


def adapted(model_type: str, window: int | None = None, dropout: float = 0.0, **changes: Any) -> tuple[Any, Any]:
    """A wrapped and a stock model with the same adapters on all linear layers, and weights of the head beside them."""
    lora = LoraConfig(
        target_modules="all-linear",
        modules_to_save=["lm_head"],
        init_lora_weights=False,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
    )
    found = []
    for wrap in (lambda model: in_float64(stateful(model)), lambda model: model):
        base: Any = tiny_model(model_type, dtype=torch.float64, **changes)
        torch.manual_seed(0)
        with InFloat64():
            found.append(get_peft_model(wrap(base), lora).train())
    return found[0], found[1]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("model_type", ["bamba", "qwen3_5_text"])
@pytest.mark.parametrize("form", WORDS)
def test_adapters_on_all_linear_layers_get_their_gradients(model_type: str, form: str) -> None:
    model, stock = adapted(model_type)
    with InFloat64():
        expected = slopes(read_alone(lambda ids: stock(input_ids=ids, use_cache=False).logits, form, "all"), stock)
    found = slopes(in_chunks(model, batch(form), 7).loss, model)
    assert any("k_proj.lora_B" in name for name, _ in model.named_parameters())
    assert relative_error(found, expected) < TOLERANCE


def by_hand(model: Any, inputs: dict[str, Tensor], borders: list[int]) -> Tensor:
    """The loss of chunks by calls that a state and a cache connect."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    state, cache, losses = None, base.new_attention_cache(), []
    for start, end in pairwise(borders):
        output = model(
            input_ids=inputs["input_ids"][:, start:end],
            initial_state=state,
            attention_cache=cache,
            output_final_state=True,
        )
        state, targets = output.final_state, inputs["labels"][:, start + 1 : end + 1]
        logits = output.logits[:, : targets.shape[1]]
        losses.append(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return torch.stack(losses).sum() / ITEMS


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bamba", "qwen3_5_text"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_dropout_is_the_same_when_chunks_are_computed_again(model_type: str, checkpointed: bool) -> None:
    """Of adapters, and of attention."""
    model, inputs = adapted(model_type, dropout=0.3, attention_dropout=0.4)[0], batch("whole")
    torch.manual_seed(3)
    expected = slopes(by_hand(model, inputs, [0, 6, 12, 18, T]), model)
    if checkpointed:
        with_checkpointing(model.get_base_model(), context_fn=lambda: (nullcontext(), InFloat64()))
    torch.manual_seed(3)
    assert relative_error(slopes(in_chunks(model, inputs, 7).loss, model), expected) < TOLERANCE
    torch.manual_seed(4)
    assert relative_error(slopes(in_chunks(model, inputs, 7).loss, model), expected) > 0.01


@pytest.mark.thinned(11)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("form", "window"), [("whole", None), ("padded", 5), ("packed", 5)])
def test_layers_that_are_checkpointed_too_give_the_same(model_type: str, form: str, window: int | None) -> None:
    with InFloat64():
        model = in_float64(stateful(tiny_model(model_type, dtype=torch.float64), attention_window=window))
    with_checkpointing(model, context_fn=lambda: (nullcontext(), InFloat64()))
    found = slopes(in_chunks(model, batch(form), 7).loss, model)
    # layers that are computed again inside of chunks that are name float32
    assert relative_error(found, truth(model_type, form, "all", window)) < 1e-7


@pytest.mark.thinned(5)
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_5_text"])
@pytest.mark.parametrize("form", WORDS)
def test_autocast_to_bfloat16_is_as_exact_in_chunks_as_in_whole_rows(model_type: str, form: str) -> None:
    model, inputs = stateful(tiny_model(model_type)).train(), batch(form)
    exact = slopes(model(**inputs, num_items_in_batch=ITEMS).loss, model)
    errors = []
    for chunk in (T, 7):
        with torch.autocast("cpu", torch.bfloat16):
            loss = in_chunks(model, inputs, chunk).loss
        found = slopes(loss, model)
        pairs = zip(found, exact, strict=True)
        errors.append(float(torch.stack([(one - other).norm() for one, other in pairs]).norm()))
    whole, chunks = errors
    assert 1e-4 < whole / float(torch.stack([slope.norm() for slope in exact]).norm()) < 0.2
    assert chunks < 1.5 * whole


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_rows_of_one_token_and_one_row_alone(model_type: str) -> None:
    model, inputs = both(model_type)[0], batch("whole")
    one = {name: value[:1] for name, value in inputs.items()}
    expected = slopes(model(**one, num_items_in_batch=ITEMS).loss, model)
    assert relative_error(slopes(in_chunks(model, one, 4).loss, model), expected) < TOLERANCE
    token = {name: value[:, :1] for name, value in inputs.items()}
    output = in_chunks(model, token, 4)
    assert all(not slope.any() for slope in slopes(output.loss, model))
    whole = model(token["input_ids"], output_final_state=True).final_state
    assert relative_error(parts(output.final_state), parts(whole)) < TOLERANCE
