"""Batched chats of three turns whose rows end early: each row gives what it gives alone, read anew at each token.

All families and hybrids, with biases and limits of step sizes where they have them; the rows are padded on the left,
and in the first turn decoded in several ways.
"""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import StoppingCriteriaList

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from tests.hybrids.measures import random_tokens
from tests.hybrids.test_law import CHANGED
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import FAMILIES, build

QUICK = {"mamba2", "gla", "rwkv7", "falcon_h1", "qwen3_next", "xlstm"}
BY_NAME = {family.name: family for family in FAMILIES}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


def cases() -> list[Any]:
    """Kind, name and changes of the configuration; quick are some greedy ones, as they are.

    Each goes in one of the ways, in turn; those without changes in a second one, greedy.
    """
    each: list[tuple[str, str, str, dict[str, Any]]] = [("family", name, "", {}) for name in BY_NAME]
    each += [("hybrid", name, "", {}) for name in SUPPORTED_TYPES]
    each += [("hybrid", name, "changed", CHANGED[name]) for name in CHANGED if name in SUPPORTED_TYPES]
    return [
        pytest.param(
            kind,
            name,
            changes,
            way,
            marks=[] if name in QUICK and way == "greedy" and not variant else [pytest.mark.slow],
            id=f"{kind}-{name}-{variant}-{way}",
        )
        for index, (kind, name, variant, changes) in enumerate(each)
        for way in sorted({[*WAYS][index % 3 if variant else 1 + index % 2], *([] if variant else ["greedy"])})
    ]


def after_end(new: Tensor, ends: list[int]) -> Tensor:
    """(B, T), true after the first end of a row."""
    is_end = torch.isin(new, torch.tensor(ends)).long()
    return is_end.cumsum(1) > is_end


@pytest.mark.thinned(29)
@torch.no_grad()
@pytest.mark.parametrize(("kind", "name", "changes", "way"), cases())
def test_rows_that_end_early_go_on_as_alone(kind: str, name: str, changes: dict[str, Any], way: str) -> None:
    stock: Any = None if kind == "family" else tiny_model(name, **changes)
    model: Any = build(BY_NAME[name], **changes).eval() if stock is None else stateful(tiny_model(name, **changes))
    argument = "cache" if kind == "family" else cache_argument(model)
    talk = random_tokens(3, 6, seed=4)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0] + [1] * 5])
    alone = [row[real.bool()][None] for row, real in zip(talk, mask, strict=True)]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    free = model.generate(talk, attention_mask=mask, **options | WAYS[way])[:, 6:]
    ends = [int(free[0, 2]), int(free[1, 5]), *(range(15) if way == "beams" else ())]
    options["eos_token_id"], start = ends, WAYS[way]
    for turn in range(3):
        torch.manual_seed(0)
        output = model.generate(talk, attention_mask=mask, return_dict_in_generate=True, **options | start)
        held = [output.cache] if kind == "family" else [x for x in output.values() if isinstance(x, HybridCache)]
        if not held:
            pytest.skip("this version of Transformers returns no cache under the name that this type has for it")
        if repeated := len(output.sequences) // len(alone) - 1:  # several answers: conversations of their own
            alone = [row for row in alone for _ in range(repeated + 1)]
            mask = mask.repeat_interleave(repeated + 1, dim=0)
        new, more = output.sequences[:, talk.shape[1] :], random_tokens(len(alone), 3, seed=9 + turn)
        for row, text in enumerate(alone):
            own = new[row, None, ~after_end(new, ends)[row]]
            if turn or way == "greedy":
                ones = torch.ones_like(text)
                anew = (stock or model).generate(text, attention_mask=ones, use_cache=False, **options)
                assert torch.equal(own, anew[:, text.shape[1] :]), (turn, row)
            alone[row] = torch.cat([text, own, more[row, None]], 1)
        assert turn or after_end(new, ends).any()
        talk = torch.cat([output.sequences, more], 1)
        mask = torch.cat([mask, (~after_end(new, ends)).long(), torch.ones_like(more)], 1)
        start = {argument: held[0]}


@torch.no_grad()
def test_a_conversation_that_is_padded_again_is_refused() -> None:
    model, talk = stateful(tiny_model("falcon_h1")), random_tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    output = model.generate(talk, attention_mask=mask, return_dict_in_generate=True, **options)
    name = cache_argument(model)
    again = torch.cat([torch.ones(2, 3).long(), output.sequences], 1)
    wrong = torch.cat([torch.zeros(2, 3).long(), mask, torch.ones(2, 3).long()], 1)
    with pytest.raises(ValueError, match=r"attention_mask counts \[3, 5\] tokens before .* has read \[6, 8\]: append"):
        model.generate(again, attention_mask=wrong, **{name: output[name]}, **options)


OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("model_type", ["granitemoehybrid", pytest.param("lfm2_moe", marks=pytest.mark.slow)])
def test_experts_are_not_counted_where_rows_end_early(model_type: str, beams: int) -> None:
    plain = stateful(tiny_model(model_type))
    model = stateful(tiny_model(model_type, output_router_logits=True))
    talk = random_tokens(2, 6, seed=4)
    end = int(plain.generate(talk, eos_token_id=None, **OPTIONS)[0, 8])
    options = OPTIONS | {"num_beams": beams, "eos_token_id": [end], "return_dict_in_generate": True}
    assert torch.equal(model.generate(talk, **options).sequences, plain.generate(talk, **options).sequences)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["family", "hybrid"])
def test_beams_that_a_criterion_ends_leave_their_own_states(kind: str) -> None:
    model: Any = build(BY_NAME["gla"]).eval() if kind == "family" else stateful(tiny_model("falcon_h1"))
    talk = random_tokens(2, 6, seed=4)
    options = OPTIONS | {"num_beams": 3, "eos_token_id": None, "return_dict_in_generate": True}
    criteria = StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] % 3 == 0])
    output = model.generate(talk, stopping_criteria=criteria, **options)
    cache = output.cache if kind == "family" else output[cache_argument(model)]
    for row, text in enumerate(output.sequences[:, :-1]):
        alone = model(text[text >= 0][None], output_final_state=True).final_state
        for layer, own in zip(cache.state, alone, strict=True):
            torch.testing.assert_close(layer.recurrent[row, None], own.recurrent, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["family", "hybrid"])
def test_an_adapter_for_each_row_goes_with_beams(kind: str) -> None:
    model: Any = build(BY_NAME["gla"]).eval() if kind == "family" else stateful(tiny_model("falcon_h1"))
    owner = model.config if kind == "family" else model
    lora = LoraConfig(target_modules=list(owner.lora_target_modules), init_lora_weights=False)
    model = get_peft_model(model, lora)
    model.add_adapter("b", lora)
    talk = random_tokens(2, 6, seed=4)
    options = OPTIONS | {"num_beams": 3, "eos_token_id": [*range(3, 10)], "return_dict_in_generate": True}
    mixed = model.eval().generate(input_ids=talk, adapter_names=["default", "b"], **options)
    for row, name in enumerate(("default", "b")):
        model.set_adapter(name)
        alone = model.generate(input_ids=talk[row, None], **options)
        width = alone.sequences.shape[1]
        assert torch.equal(mixed.sequences[row, None, :width], alone.sequences)


@torch.no_grad()
@pytest.mark.parametrize("ends", [torch.tensor([5, 6]), (5, 6), [5, 6]])
def test_ends_have_any_form(ends: Any) -> None:
    model, talk = stateful(tiny_model("falcon_h1")), random_tokens(2, 6, seed=4)
    found = model.generate(talk, eos_token_id=ends, **OPTIONS)
    assert torch.equal(found, tiny_model("falcon_h1").generate(talk, eos_token_id=[5, 6], **OPTIONS))


@torch.no_grad()
def test_a_second_turn_may_be_tried_again() -> None:
    model, talk = stateful(tiny_model("falcon_h1")), random_tokens(2, 6, seed=4)
    name, options = cache_argument(model), OPTIONS | {"eos_token_id": None}
    first = model.generate(talk, return_dict_in_generate=True, **options)
    again, arguments = torch.cat([first.sequences, random_tokens(2, 3)], 1), {name: first[name]}
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(again, num_beams=2, unknown=1, **arguments, **options)
    assert torch.equal(model.generate(again, **arguments, **options), model.generate(again, **options))


@torch.no_grad()
def test_a_cache_may_have_a_row_for_each_beam_and_is_as_it_was_after_an_error() -> None:
    model, talk = build(BY_NAME["gla"]).eval(), random_tokens(2, 6, seed=4)
    beams = OPTIONS | {"eos_token_id": None, "num_beams": 3}
    read = model(talk[:, :-2]).cache
    again = copy.copy(read)
    with pytest.raises(ValueError, match="same rows"):
        model.generate(talk[:1], cache=again, **beams)
    again.batch_repeat_interleave(3)
    expected = model.generate(talk, **beams)
    assert torch.equal(model.generate(talk, cache=read, **beams), expected)
    assert torch.equal(model.generate(talk, cache=again, **beams), expected)
