"""Weighted sums and compositions of states, against numbers by hand, orders one by one, and reading."""

import json
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, WindowedLayerState, zero_conv
from hf_recurrent_lengthgen.state_files import (
    TextState,
    add_weighted_adapter,
    ask,
    branch,
    load_text_state,
    mix_states,
    mix_text_states,
    read_into,
    read_text,
    save_text_state,
)
from hf_recurrent_lengthgen.state_files.mixing import compose
from tests.models.families import (
    FAMILIES,
    GLA,
    KDA,
    MAMBA2,
    RWKV5,
    RWKV6,
    RWKV7,
    Family,
    build,
    random_state,
    random_tokens,
)
from tests.state_files.test_text_state import assert_same, hybrid, text

LENGTHS = (7, 1, 20, 13)
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}


def state_of(recurrent: list[list[float]], conv: list[list[float]]) -> RecurrentState:
    return (LayerState(torch.tensor(recurrent).float(), torch.tensor(conv).float()),)


def exact(model_or_family: Any, **changes: Any) -> Any:
    return build(model_or_family, torch.float64, **changes)


def texts(rows: int = 2) -> list[Tensor]:
    return [random_tokens(rows, length, seed) for seed, length in enumerate(LENGTHS)]


def read_all(model: Any, documents: list[Tensor], **options: Any) -> list[TextState]:
    return [read_text(model, one, transitions=True, **options) for one in documents]


def assert_close(one: RecurrentState, other: RecurrentState) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left.recurrent, right.recurrent, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(left.conv, right.conv, rtol=1e-9, atol=1e-11)


def test_a_weighted_sum_is_that_of_all_parts() -> None:
    states = [state_of([[1, 2]], [[3]]), state_of([[10, 20]], [[30]]), state_of([[0, 4]], [[-6]])]
    (mean,), (added,) = mix_states(states[:2]), mix_states(states, [1, 1, -0.5])
    assert [part.tolist() for part in mean] == [[[5.5, 11]], [[16.5]]]
    assert [part.tolist() for part in added] == [[[11, 20]], [[36]]]


@pytest.mark.parametrize(
    ("other", "weights", "complaint"),
    [
        ([], None, "at least one state"),
        ([state_of([[1, 2]], [[3]])], [1, 2], "a finite weight for each: 1 states"),
        ([state_of([[1, 2]], [[3]])], [float("nan")], "finite weight"),
        ([state_of([[1, 2]], [[3]]), state_of([[1, 2, 3]], [[3]])], None, "Give states of the same layers, rows"),
        ([state_of([[1, 2]], [[3]]), state_of([[1, 2]], [[3]]) * 2], None, "Give states of the same layers, rows"),
        ([(WindowedLayerState(*[torch.ones(1, 2)] * 3),)], None, "a window"),
    ],
)
def test_states_that_cannot_be_added_are_refused(other: Any, weights: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        mix_states(other, weights)


def test_a_composition_is_that_of_numbers_by_hand() -> None:
    written, decays = [torch.tensor([[float(x)]]) for x in (1, 2, 4)], [torch.tensor([[x]]) for x in (0.5, 0.0, 0.25)]
    assert compose(written, decays).item() == 4 + 0.25 * (2 + 0.0 * 1)
    # 1, 2, 3: 4.5   2, 3, 1: 1 + 0.5 (4 + 0.25 * 2) = 3.25   3, 1, 2: 2 + 0 = 2
    assert compose(written, decays, "cyclic").item() == pytest.approx((4.5 + 3.25 + 2) / 3)
    # and 1, 3, 2: 2   2, 1, 3: 4 + 0.25 (1 + 0.5 * 2) = 4.5   3, 2, 1: 1 + 0.5 * 2 = 2
    assert compose(written, decays, "all").item() == pytest.approx((4.5 + 3.25 + 2 + 2 + 4.5 + 2) / 6)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 3, 1, 4), (2, 3, 4, 4)], ids=["decay", "decays", "matrices"])
def test_orders_are_all_orders(count: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    moves = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    moves[0][:, :2] = 0
    written = [torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(count)]

    def folded(order: tuple[int, ...]) -> Tensor:
        state = torch.zeros_like(written[0])
        for i in order:
            state = (state @ moves[i] if shape[2] > 1 else state * moves[i]) + written[i]
        return state

    every = list(permutations(range(count)))
    rotations = [tuple((first + i) % count for i in range(count)) for first in range(count)]
    for orders, expected in (("listed", every[:1]), ("cyclic", rotations), ("all", every)):
        if orders == "all" and shape[2] > 1:
            continue  # refused, below
        mean = torch.stack([folded(order) for order in expected]).mean(0)
        torch.testing.assert_close(compose(written, moves, orders), mean, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_many_texts_have_weights_that_are_known() -> None:
    # transitions of 1 forget nothing, and those of 0 all but the last text
    written = [torch.full((1, 1, 1, 1), float(i), dtype=torch.float64) for i in range(60)]
    for decay, expected in ((1.0, sum(range(60))), (0.0, sum(range(60)) / 60)):
        moves = [torch.full((1, 1, 1, 1), decay, dtype=torch.float64)] * 60
        for orders in ("cyclic", "all"):
            assert compose(written, moves, orders).item() == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='matrices, which do not commute: give orders="cyclic"'):
        compose([torch.ones(1, 1, 2, 2)] * 2, [torch.ones(1, 1, 2, 2)] * 2, "all")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_composed_documents_are_those_read_one_after_another(family: Family) -> None:
    """One layer, whose convolution or token shift begins anew with each document; chunks do not divide the lengths."""
    model, documents = exact(family, **ONE_LAYER), texts()
    states = read_all(model, documents, chunk_length=6)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        after = model.zero_state(2)
        for i in order:
            with torch.no_grad():
                after = model(documents[i], initial_state=zero_conv(after)).final_state
        composed = mix_text_states([states[i] for i in order], orders="listed").state
        if family in (RWKV5, RWKV6, RWKV7):  # the shift of their channel mixing takes outputs of the layer
            composed, after = (
                tuple(layer._replace(conv=layer.conv.chunk(2, dim=1)[0]) for layer in state)
                for state in (composed, after)
            )
        assert_close(composed, after)
    assert max(float(part.abs().max()) for part in states[0].transitions.values()) > 1e-3  # something goes through


@pytest.mark.parametrize("family", [GLA, KDA], ids=lambda family: family.name)
def test_without_convolution_a_composition_is_the_concatenation_and_can_be_continued(family: Family) -> None:
    model = exact(family, **ONE_LAYER, **({} if family is GLA else {"use_short_conv": False}))
    states, whole = read_all(model, texts()), read_text(model, torch.cat(texts(), dim=1), transitions=True)
    composed = mix_text_states([mix_text_states(states[:2], orders="listed"), *states[2:]], orders="listed")
    assert_close(composed.state, whole.state)
    assert composed.position == whole.position == sum(LENGTHS)
    torch.testing.assert_close(composed.transitions, dict(whole.transitions), rtol=1e-9, atol=1e-11)
    prompt = random_tokens(2, 5, seed=9)
    answers = [ask(model, one, prompt, max_new_tokens=4, do_sample=False) for one in (composed, whole)]
    assert torch.equal(*answers)


def test_decays_of_zero_are_exact() -> None:
    model = exact(MAMBA2, **ONE_LAYER)
    with torch.no_grad():
        model.backbone.layers[0].mixer.A_log.fill_(50.0)  # exp(-e^50 Δ) is 0
    states = read_all(model, texts())
    assert all(float(one.transitions[0].abs().max()) == 0 for one in states)
    assert_close(mix_text_states(states, orders="listed").state, states[-1].state)
    assert_close(mix_text_states(states, orders="all").state, mix_text_states(states).state)


def test_upper_layers_are_approximated_and_the_first_is_not() -> None:
    model = exact(GLA, num_hidden_layers=2)
    states, whole = read_all(model, texts()), read_text(model, torch.cat(texts(), dim=1))
    first, second = mix_text_states(states, orders="listed").state
    torch.testing.assert_close(first.recurrent, whole.state[0].recurrent, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(second.recurrent, whole.state[1].recurrent, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", [MAMBA2, RWKV6, KDA], ids=lambda family: family.name)
def test_transitions_do_not_depend_on_chunks_and_files(family: Family, tmp_path: Path) -> None:
    model, tokens = exact(family), random_tokens(1, 23)
    whole = read_text(model, tokens, transitions=True)
    part = read_text(model, tokens[:, :9], transitions=True, chunk_length=4)
    for again in (
        read_text(model, tokens, transitions=True, chunk_length=5),
        read_text(model, tokens[:, 9:], part, transitions=True),
        list(read_into(tmp_path / "book", model, tokens, 8, transitions=True))[-1],
        load_text_state(tmp_path / "book", model),
    ):
        torch.testing.assert_close(dict(again.transitions), dict(whole.transitions), rtol=1e-9, atol=1e-11)
    assert {*whole.transitions} == {*range(len(whole.state))}
    assert not branch(whole, 3).transitions  # they are of one text
    assert not read_text(model, tokens, part).transitions  # they would be those of the beginning
    with pytest.raises(ValueError, match="was read without transitions"):
        read_text(model, tokens, read_text(model, tokens), transitions=True)
    list(read_into(tmp_path / "plain", model, tokens, 8))
    with pytest.raises(ValueError, match="plain was read without transitions"):
        list(read_into(tmp_path / "plain", model, tokens, 8, transitions=True))


def test_what_was_mixed_is_recorded_and_saved(tmp_path: Path) -> None:
    model = exact(RWKV6)
    states = [replace(one, metadata={"title": f"text {i}"}) for i, one in enumerate(read_all(model, texts(1)[:2]))]
    mixed = mix_text_states(states, [0.25, 0.5])
    for own, one, two in zip(mixed.state, *(state.state for state in states), strict=True):
        torch.testing.assert_close(own.recurrent, 0.25 * one.recurrent + 0.5 * two.recurrent)
        torch.testing.assert_close(own.conv, 0.25 * one.conv + 0.5 * two.conv)
    assert (mixed.position, mixed.prefix, mixed.transitions) == (8, "", {})
    save_text_state(tmp_path / "mixed", mixed)
    loaded = load_text_state(tmp_path / "mixed", model)
    assert_same(loaded, mixed)
    record = json.loads(loaded.metadata["mixed"])
    assert (record["weights"], record["orders"]) == ([0.25, 0.5], None)
    for weights in (torch.tensor([0.25, 0.5]), np.array([0.25, 0.5])):
        assert mix_text_states(states, weights).metadata == mixed.metadata
    assert record["texts"][1] == {"title": "text 1", "position": 1, "prefix_sha256": states[1].prefix}


def test_the_record_of_a_mixed_text_grows_with_the_number_of_texts() -> None:
    state = read_text(build(GLA), random_tokens(1, 5))
    mixed = [state]
    for _ in range(20):
        mixed.append(mix_text_states([mixed[-1], state]))
    sizes = [len(one.metadata["mixed"]) for one in mixed[1:]]
    assert max(later - earlier for earlier, later in pairwise(sizes)) < 300
    assert json.loads(mixed[3].metadata["mixed"])["texts"][0]["mixed"] == json.loads(mixed[2].metadata["mixed"])
    own = mix_text_states([replace(state, metadata={"mixed": "of the user"})])
    assert json.loads(own.metadata["mixed"])["texts"][0]["mixed"] == "of the user"


def test_text_states_that_do_not_belong_together_are_refused() -> None:
    model, tokens = build(GLA), random_tokens(1, 9)
    one, other = read_text(model, tokens, tokenizer=byte_tokenizer()), read_text(build(GLA, seed=1), tokens)
    with pytest.raises(ValueError, match="differ in weights: give those that one model read"):
        mix_text_states([one, other])
    with pytest.raises(ValueError, match="differ in tokenizer"):
        mix_text_states([one, replace(one, origin=replace(one.origin, tokenizer="another"))])
    assert mix_text_states([one, read_text(model, tokens)]).position == 18  # an unknown tokenizer fits
    with pytest.raises(ValueError, match="without transitions cannot be composed"):
        mix_text_states([one, one], orders="listed")
    with pytest.raises(ValueError, match="Give either weights, or orders"):
        mix_text_states([one, one], [1, 1], orders="all")
    with pytest.raises(ValueError, match="got None and 'any'"):
        mix_text_states([one, one], orders="any")  # type: ignore[arg-type]
    attending = read_text(hybrid("jamba"), text(9))
    with pytest.raises(ValueError, match="Keys and values of attention layers"):
        mix_text_states([attending, attending])


def test_models_whose_texts_are_no_such_maps_are_refused() -> None:
    forgetting = build(MAMBA2, forgetting={"retention": 0.9})
    learned = build(GLA)
    learned.add_learned_state("story", random_state(learned, 1))
    for model in (forgetting, learned):
        with pytest.raises(ValueError, match="is made to forget, or starts from a learned state"):
            read_text(model, random_tokens(1, 9), transitions=True)
    with pytest.raises(ValueError, match="a hybrid reads cannot be composed"):
        read_text(hybrid("jamba"), text(9), transitions=True)


def test_learned_states_are_mixed_under_a_new_name() -> None:
    model = build(GLA)
    for seed, name in enumerate(("one", "two")):
        model.add_learned_state(name, random_state(model, 1, seed))
    one, two = (random_state(model, 1, seed) for seed in (0, 1))
    states = add_weighted_adapter(model, ["one", "two"], [0.5, 2.0], "both")
    assert states.active_adapter == "both"
    assert states.names == ["one", "two", "both"]
    for own, first, second in zip(states["both"](), one, two, strict=True):
        torch.testing.assert_close(own.recurrent, 0.5 * first.recurrent + 2 * second.recurrent)
    assert not any(parameter.requires_grad for parameter in states["both"].parameters())
    with pytest.raises(ValueError, match="no learned state 'three': give one of"):
        add_weighted_adapter(model, ["one", "three"], [1, 1], "more")
    model.learned_states.set_scale("two", 0.5)
    add_weighted_adapter(model, ["one", "two"], [0.5, 2.0], "scaled")
    for own, first, second in zip(states["scaled"](), one, two, strict=True):
        torch.testing.assert_close(own.recurrent, 0.5 * first.recurrent + second.recurrent)
    with pytest.raises(ValueError, match="has no learned states"):
        add_weighted_adapter(build(GLA), ["one"], [1], "more")
