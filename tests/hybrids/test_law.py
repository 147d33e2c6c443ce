"""The law of wrapped models: in any chunks, a text gives what it gives at once.

Compared are logits, the final states, keys and values, and the gradients of a number that depends on all of them: of
embeddings, parameters, initial states, and initial keys and values. The truth reads each sequence alone and at once:
the stock model from nothing, with a mask of the window made by hand, or the wrapped model from a random start.

All is computed in float64, also where code names float32 (`InFloat64`), so that nothing differs but what is wrong.
"""

import copy
import functools
import inspect
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.hybrids.windows import limits_of, window_of
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state, take_rows
from tests.hybrids.measures import (
    gradients,
    masked,
    parts,
    random_state,
    random_tokens,
    relative_error,
    state_of_stock_cache,
    weighted_sum,
    with_checkpointing,
    without_checkpointing,
)
from tests.hybrids.padded_rows import PADDED, places_of, positions_and_mask
from tests.hybrids.tiny_models import SUPPORTED_TYPES, VOCABULARY, tiny_model

TOLERANCE = 5e-12
QUICK = {"falcon_h1", "kimi_linear", "lfm2", "minimax", "nemotron_h", "qwen3_next", "xlstm", "zamba"}
WITHOUT_ATTENTION = {"falcon_mamba", "mamba", "mamba2", "xlstm"}
PACKED = [  # at cuts, no sequence begins but the first of a row
    "aaaaabbbbbbbccccccccdddd",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "..aa.bbb..ccddddddddeee.",
    "......................aa",
    "..................abcccc",
    "aaaaaaaaabbbbbbbbbbbbbbb",
    "a.......................",
    "aa.a..aaa......a.a..aaa.",
    "........................",
]
WORDS = {"whole": ["a" * 70] * 2, "padded": PADDED, "packed": PACKED}  # 70 is more than a chunk of any scan
CUTS = ["at once", "1", "2", "3", "17", "T-1", "every"]
LIMITED = {"mamba_proj_bias": True, "time_step_limit": (0.6, 0.9)}
CHANGED: dict[str, dict[str, Any]] = {  # what mixers read, and tiny configurations leave as it is
    "bamba": LIMITED | {"mamba_conv_bias": False},
    "falcon_h1": LIMITED | {"mamba_rms_norm": True},
    "falcon_mamba": {"use_bias": True, "use_conv_bias": False},
    "granitemoehybrid": LIMITED | {"position_embedding_type": "rope"},
    "jamba": {"mamba_proj_bias": True, "mamba_conv_bias": False},
    "lfm2": {"conv_bias": True},
    "mamba": {"use_bias": True, "hidden_act": "gelu"},
    "mamba2": {"use_bias": True, "use_conv_bias": False, "time_step_limit": (0.6, 0.9)},
    "nemotron_h": {"mamba_proj_bias": True, "use_bias": True, "time_step_min": 0.6},
    "olmo_hybrid": {"linear_allow_neg_eigval": False},
    "zamba": {"mamba_proj_bias": True},
    "zamba2": {"add_bias_linear": True, "use_mem_rope": True, "time_step_min": 0.6},
}
READ = (5, 3, 0, 6, 1, 2, 4, 6, 2)
"""Tokens of each row before the call; of whole rows 5."""


class InFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args, named = (
            [torch.float64 if x is torch.float32 else x for x in y] for y in (args, (kwargs or {}).values())
        )
        return func(*args, **dict(zip(kwargs or {}, named, strict=True)))


class Start(NamedTuple):
    """States of B rows, and the keys and values (B, H, n, D) before them, of which each row has read `lengths`."""

    state: RecurrentState
    keys: dict[int, Any]
    lengths: tuple[int, ...]

    @property
    def leaves(self) -> list[Tensor]:
        every = [*parts(self.state), *(x for pair in self.keys.values() for x in pair)]
        return [x for x in every if x.requires_grad and x.numel()]

    def row(self, row: int) -> "Start":
        length = self.lengths[row]
        keys = {
            i: tuple(x[row, None, :, max(0, x.shape[2] - length) :] for x in pair) for i, pair in self.keys.items()
        }
        return Start(take_rows(self.state, slice(row, row + 1)), keys, (length,))

    def cache(self, model: Any) -> Any:
        cache, longest = model.new_attention_cache(), max(self.lengths)
        if cache is None or not longest:
            return cache
        return cache.replaced(self.keys, longest, None if {*self.lengths} == {longest} else torch.tensor(self.lengths))


def start_of(model: Any, rows: int, kind: str) -> Start:
    """Nothing, or random states, keys and values that take gradients."""
    generator, lengths = torch.Generator().manual_seed(4), READ[:rows] if rows > 2 else READ[:1] * rows
    if kind == "nothing":
        lengths = (0,) * rows
    columns = min([max(lengths), *(limit for limit in limits_of(model) if limit is not None)])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype).requires_grad_()

    state = model.zero_state(rows)
    if kind == "random":  # but the normalizer of xLSTM belongs to its memory
        xlstm = model.config.model_type == "xlstm"
        state = random_state(model, rows) if xlstm else map_state(lambda part: random(*part.shape), state)
    keys = {i: tuple(random(rows, H, columns, D) for H, D in sizes) for i, sizes in model._layout.attending.items()}
    return Start(state, keys, lengths)


def keys_of(cache: Any) -> dict[int, Any]:
    """Keys and values of the layers of a cache that have them."""
    layers = enumerate(getattr(cache, "layers", ()))
    return {i: (layer.keys, layer.values) for i, layer in layers if getattr(layer, "keys", None) is not None}


def seen(model: Any, keys: dict[int, Any], row: int, length: int) -> list[Tensor]:
    """Of the keys and values of a row that has read so many tokens those that later tokens see, flat."""
    limits = [length if limit is None else min(length, limit) for limit in limits_of(model)]
    return [x[row, :, x.shape[2] - limits[i] :].flatten() for i, pair in keys.items() for x in pair]


def by_chunks(model: Any, embeds: Tensor, words: list[str], lengths: list[int], start: Start) -> list[Tensor]:
    """Logits, zero at padding, final states, keys and values; from one call for each chunk."""
    (positions, mask), logits = positions_and_mask(words), []
    for row, word in enumerate(words if model.attends else []):
        positions[row, [place for places in places_of(word)[:1] for place in places]] += start.lengths[row]
    packed, state, cache = any("b" in word for word in words), start.state, start.cache(model)
    for chunk, place, real in zip(*(x.split(lengths, dim=1) for x in (embeds, positions, mask)), strict=True):
        arguments = {"position_ids": place} if packed else {}
        arguments |= {} if bool(mask.all()) else {"attention_mask": real}
        output = model(inputs_embeds=chunk, initial_state=state, attention_cache=cache, **arguments)
        state = output.final_state
        logits.append(output.logits * real[..., None])
    left = []
    for row in range(len(words)) if model.attends else ():
        length = cache.position if cache.lengths is None else int(cache.lengths[row])
        left.append(seen(model, keys_of(cache), row, length))
    return [torch.cat(logits, dim=1), *parts(state), *map(torch.cat, zip(*left, strict=True))]


def by_sequences(model: Any, stock: Any, embeds: Tensor, words: list[str], start: Start) -> list[Tensor]:
    """The same from one call for each sequence, of the stock model where there is nothing before it."""
    logits, states, left = embeds.new_zeros(*embeds.shape[:2], VOCABULARY), [], []
    nothing, window = start_of(model, 1, "nothing"), window_of(model.config)
    for row, word in enumerate(words):
        before = start.row(row)
        found, keys = parts(before.state), seen(model, before.keys, 0, before.lengths[0])
        for places in places_of(word):
            one, length = embeds[row, None, places], before.lengths[0] + len(places)
            if max(start.lengths):
                cache = before.cache(model)
                output = model(inputs_embeds=one, initial_state=before.state, attention_cache=cache)
                found = parts(output.final_state)
            else:
                output = (
                    stock(inputs_embeds=one, use_cache=True)
                    if window is None
                    else masked(stock, one, window, use_cache=True)
                )
                cache = getattr(output, cache_argument(model))
                found = state_of_stock_cache(model, cache)
            keys, before = seen(model, keys_of(cache), 0, length), nothing
            logits = logits.index_put((torch.tensor(row), torch.tensor(places)), output.logits[0])
        states.append(found)
        left.append(keys)
    return [logits, *map(torch.cat, zip(*states, strict=True)), *map(torch.cat, zip(*left, strict=True))]


@functools.cache
def both(model_type: str, changed: bool, window: int | None, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A wrapped model and a stock one of the same weights."""
    stock: Any = tiny_model(model_type, dtype=dtype, **CHANGED[model_type] if changed else {})
    model = stateful(copy.deepcopy(stock), attention_window=window)
    for block in stock.base_model.blocks if model_type == "xlstm" else ():  # it writes over states that gradients need
        block.register_forward_pre_hook(lambda _, args: (args[0], args[1] and [x.clone() for x in args[1]], *args[2:]))
    return model, stock


def results_of(read: Any, owner: Any, words: list[str], start: Start) -> list[Tensor]:
    """What is read from embeddings, and the gradients of a number that depends on all of it."""
    tokens = random_tokens(len(words), len(words[0]))
    embeds = owner.get_input_embeddings()(tokens).detach().requires_grad_()
    results = read(embeds)
    slopes = gradients(weighted_sum(results), [embeds, *start.leaves, *owner.parameters()])
    return [x.detach() for x in (*results, *slopes)]


@functools.cache
def truth(model: Any, stock: Any, form: str, kind: str) -> tuple[Start, list[Tensor]]:
    """A start, and what each sequence alone gives from it."""
    words = WORDS[form]
    start = start_of(model, len(words), kind)
    owner = model if max(start.lengths) else stock
    return start, results_of(lambda x: by_sequences(model, stock, x, words, start), owner, words, start)


def largest_error(
    model: Any, stock: Any, form: str, split: str, kind: str, modes: tuple[bool, ...] = (False, True)
) -> float:
    """Of chunks against sequences alone, with activation checkpointing and without."""
    words, T = WORDS[form], len(WORDS[form][0])
    every = {"whole": [*range(1, 8), *range(62, T)], "packed": [1, 2, 3, 6, 13, 14, 16, 17, 21, 23]}
    named = {"at once": [], "T-1": [T - 1], "every": every.get(form) or list(range(1, T))}
    cuts = named[split] if split in named else [int(split)]
    lengths, errors = [stop - begin for begin, stop in pairwise([0, *cuts, T])], []
    without_checkpointing(model)
    start, expected = truth(model, stock, form, kind)
    for checkpointed in modes:
        if checkpointed:  # backward leaves the mode
            wide = model.dtype == torch.float64
            with_checkpointing(model, **{"context_fn": lambda: (nullcontext(), InFloat64())} if wide else {})
        actual = results_of(lambda x: by_chunks(model, x, words, lengths, start), model, words, start)
        errors.append(relative_error(actual, expected))
    return max(errors)


def cases() -> list[Any]:
    """Of each form of each type two splits or three, and one start, so that each pair of values comes together.

    Each split has activation checkpointing in every second form.
    """
    found = []
    for number, name in enumerate(SUPPORTED_TYPES):
        each: list[tuple[bool, str, Any]] = [(False, form, None) for form in WORDS]
        each += [(True, "padded", None)] * (name in CHANGED)
        windows = [("padded", 5), ("packed", 1)]
        each += [(False, *one) for one in windows] * (name not in WITHOUT_ATTENTION)
        for index, (changed, form, window) in enumerate(each):
            label = "-".join([name, "changed"][: 1 + changed] + [form] + [f"window {window}"] * (window is not None))
            marks = [] if name in QUICK else [pytest.mark.slow]
            kind = ("nothing", "random")[(number + index) % 2]
            for split in (CUTS[(number + 3 * index + step) % len(CUTS)] for step in range(2 + (len(each) == 3))):
                modes = (False, True) if (index + CUTS.index(split)) % 2 else (False,)
                case = (name, changed, window), form, split, kind, modes
                found.append(pytest.param(*case, marks=marks, id=f"{label}-{split}-{kind}"))
    return found


@pytest.mark.thinned(13)
@pytest.mark.parametrize(("config", "form", "split", "kind", "modes"), cases())
def test_chunks_are_the_whole(
    config: tuple[str, bool, int | None], form: str, split: str, kind: str, modes: tuple[bool, ...]
) -> None:
    with InFloat64():
        assert largest_error(*both(*config), form, split, kind, modes) < TOLERANCE


@pytest.mark.thinned(5)
@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted({*SUPPORTED_TYPES} - {"xlstm"}))  # whose cache cannot be filled
def test_random_states_and_keys_go_on_as_in_single_steps_of_the_stock_model(model_type: str) -> None:
    """A truth for states that no text leaves behind."""
    tokens = random_tokens(2, 6)
    unlimited: dict[str, Any] = (
        {"time_step_min": 1e-30} if model_type in ("nemotron_h", "zamba2") else {}
    )  # which single steps ignore
    with InFloat64():
        stock: Any = tiny_model(model_type, dtype=torch.float64, **unlimited)
        model = stateful(copy.deepcopy(stock))
        start, name = start_of(model, 2, "random"), cache_argument(model)
        cache = stock(input_ids=tokens[:, :1], use_cache=True)[name]
        for held, part in zip(state_of_stock_cache(model, cache), parts(start.state), strict=True):
            held.copy_(part)
        for index, pair in start.keys.items():
            cache.layers[index].keys, cache.layers[index].values = pair
            cache.layers[index].cumulative_length = READ[0]
        output = model(input_ids=tokens, initial_state=start.state, attention_cache=start.cache(model))
        logits, places = [], "position_ids" in inspect.signature(stock.forward).parameters
        for place, token in enumerate(tokens.split(1, dim=1), READ[0]):
            arguments = {"position_ids": torch.tensor([[place]])} if places else {}  # Bamba does not ask the cache
            logits.append(stock(input_ids=token, **{name: cache}, **arguments).logits)
        found = [output.logits, *parts(output.final_state)]
        assert relative_error(found, [torch.cat(logits, 1), *state_of_stock_cache(model, cache)]) < TOLERANCE
