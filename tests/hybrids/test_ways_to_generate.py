"""Every way to generate with every family and every hybrid: what each row alone gives in evaluation, or a refusal."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import map_state, take_rows
from tests.hybrids.measures import by_calls, random_state, with_checkpointing
from tests.hybrids.tiny_models import SUPPORTED_TYPES, VOCABULARY, tiny_model
from tests.models.families import FAMILIES, build

LENGTHS = (4, 9, 1)
NEW = 5
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
BY_NAME = {family.name: family for family in FAMILIES}
QUICK = {"gla", "jamba", "xlstm"}
OWN = [pytest.param("family", name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in BY_NAME]
STOCK = [pytest.param("hybrid", name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SUPPORTED_TYPES]

MASK = torch.tensor([[0] * (9 - length) + [1] * length for length in LENGTHS])
IDS = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1)).masked_fill(MASK == 0, 0)
TURNED = torch.stack([row.roll(length) for row, length in zip(IDS, LENGTHS, strict=True)])  # padding on the right
"""Prompts behind padding, and the same before it."""


def new_model(kind: str, name: str) -> Any:
    return (build(BY_NAME[name]) if kind == "family" else stateful(tiny_model(name))).eval()


def rows_by_calls(model: Any, state: Any) -> Tensor:
    """Greedy tokens of each row alone, each from a call with the whole text."""
    rows = []
    for row, length in enumerate(LENGTHS):
        arguments = {"use_cache": False} if state is None else {"initial_state": take_rows(state, slice(row, row + 1))}
        rows.append(by_calls(model, IDS[row : row + 1, -length:], NEW, **arguments))
    return torch.cat(rows)


def alone(model: Any, **options: Any) -> Tensor:
    """What `generate` gives for each row alone."""
    rows = [
        model.generate(IDS[i : i + 1, -length:], **options)[:, length:].flatten() for i, length in enumerate(LENGTHS)
    ]
    return torch.stack(rows)


def refused(what: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether the call is refused in a sentence; if not, it must give these tokens."""
    try:
        found = what()
    except ValueError as refusal:
        return len(str(refusal).split()) > 6
    assert torch.equal(found.reshape(len(expected), -1)[:, -expected.shape[1] :], expected)
    return False


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("kind", "name"), [*OWN, *STOCK])
def test_every_way_to_generate_is_right_or_refused(kind: str, name: str) -> None:
    model = new_model(kind, name)
    plain, flags = rows_by_calls(model, None), {"return_dict_in_generate": True, **GREEDY}
    state = map_state(Tensor.detach, model(IDS[:, -3:].clamp(min=3), output_final_state=True).final_state)
    carried, left = rows_by_calls(model, state), {"attention_mask": MASK}
    beams = GREEDY | {"num_beams": 2}
    ways: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "left": (lambda: model.generate(IDS, **left, **GREEDY), plain),
        "left, by their ids": (lambda: model.generate(IDS, pad_token_id=0, **GREEDY), plain),
        "right": (lambda: model.generate(TURNED, attention_mask=TURNED.ne(0).long(), **GREEDY), plain),
        "no cache": (lambda: model.generate(IDS, **left, use_cache=False, **GREEDY), plain),
        "state": (lambda: model.generate(IDS, **left, initial_state=state, **GREEDY), carried),
        "logits": (lambda: model.generate(IDS, **left, output_logits=True, **flags).sequences, plain),
        "hidden": (lambda: model.generate(IDS, **left, output_hidden_states=True, **flags).sequences, plain),
    }
    found = {way for way, case in ways.items() if refused(*case)}
    try:
        each = alone(model, **beams)
    except ValueError:
        found.add("beams")
    else:
        found |= {"beams"} if refused(lambda: model.generate(IDS, **left, **beams), each) else set()

    def sampled(**padding: Any) -> Tensor:
        torch.manual_seed(3)
        ids = IDS[:1] if padding else IDS[:1, -LENGTHS[0] :]
        return model.generate(ids, **padding, **GREEDY | {"do_sample": True})[:, -NEW:]  # type: ignore[no-any-return]

    found |= {"sampling"} if refused(lambda: sampled(attention_mask=MASK[:1]), sampled()) else set()
    with_checkpointing(model)
    one = take_rows(state, slice(1, 2))
    training: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "training": (lambda: alone(model, **GREEDY), plain),
        "training, left": (lambda: model.generate(IDS, **left, **GREEDY), plain),
        "training, state": (lambda: model.generate(IDS[1:2], initial_state=one, **GREEDY), carried[1:2]),
    }
    found |= {way for way, case in training.items() if refused(*case)}
    assert not found


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name"), [*OWN, *STOCK][::3])
def test_offloaded_models_carry_states(kind: str, name: str) -> None:
    """Every third one, in memory and on disk in turn."""
    whole = new_model(kind, name)
    ids = IDS[1:2]
    state = whole(ids, output_final_state=True).final_state
    expected = whole(ids, initial_state=state).logits
    texts = [whole.generate(ids, **more, **GREEDY) for more in ({}, {"initial_state": state})]
    model, place = new_model(kind, name), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        if [*BY_NAME, *SUPPORTED_TYPES].index(name) % 2:
            disk_offload(model, folder, place)
        else:
            cpu_offload(model, place)
        assert next(model.parameters()).is_meta
        assert model.zero_state(1)[0].conv.device.type == "cpu"
        torch.testing.assert_close(model(ids, initial_state=state).logits, expected, rtol=0, atol=0)
        for text, more in zip(texts, ({}, {"initial_state": state}), strict=True):
            assert torch.equal(model.generate(ids, **more, **GREEDY), text)


@pytest.mark.parametrize("places", [{"": "disk"}, {"": "cpu"}], ids=str)
def test_a_device_map_of_from_pretrained_is_exact_in_families_and_reported_to_stateful(places: dict[str, str]) -> None:
    whole, stock = new_model("family", "gla"), tiny_model("lfm2")
    state = whole(IDS[1:2], output_final_state=True).final_state
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        for model, place in ((whole, folder), (stock, other)):
            model.save_pretrained(place)
        options: dict[str, Any] = {"device_map": places, "offload_folder": f"{folder}/offloaded"}
        loaded = type(whole).from_pretrained(folder, **options)
        logits = loaded(IDS[1:2], initial_state=state).logits
        torch.testing.assert_close(logits, whole(IDS[1:2], initial_state=state).logits, rtol=0, atol=0)
        wrapped: Any = type(stock).from_pretrained(other, **options)
        if places[""] == "cpu":  # no hooks
            assert stateful(wrapped).attends
        else:
            with pytest.raises(ValueError, match=r"offloading.*call stateful"):
                stateful(wrapped)


def test_a_learned_state_is_added_after_offloading() -> None:
    model, whole = new_model("family", "gla"), new_model("family", "gla")
    values = map_state(torch.ones_like, whole.zero_state(1))
    for one in (model, whole):
        one.add_learned_state("one", values)
    cpu_offload(model, torch.device("cpu"))
    model.learned_states.delete_adapter("one")
    model.add_learned_state("other", values)
    torch.testing.assert_close(model(IDS[1:2]).logits, whole(IDS[1:2]).logits, rtol=0, atol=0)


def test_prompts_may_be_embeddings() -> None:
    model = new_model("hybrid", "qwen3_next")
    state = map_state(Tensor.detach, random_state(model, 3))
    arguments = {"attention_mask": MASK, "initial_state": state, **GREEDY}
    generated = model.generate(inputs_embeds=model.get_input_embeddings()(IDS), **arguments)
    assert torch.equal(generated, model.generate(IDS, **arguments)[:, 9:])
