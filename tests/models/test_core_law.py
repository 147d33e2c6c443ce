"""The core law of whole models: T tokens at once equal any pieces with the state carried."""

import weakref
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import clone_state, concatenate_rows, map_state

from .families import FAMILIES, VARIANTS, Family, build, random_state, random_tokens, variant_id
from .law import assert_equal_up_to, model_step, run_in_pieces

LENGTHS = {1: [], 2: [1], 3: [1, 2], 63: [1, 33], 64: [63], 65: [64], 200: [1, 2, 4, 68, 131]}
BY_NAME = {family.name: family for family in FAMILIES}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
every_variant = pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=variant_id)


def law(model: Any, length: int, cuts: list[int], mask: Tensor | None = None, batch: int = 2) -> dict[str, Tensor]:
    embeds = model.get_input_embeddings()(random_tokens(batch, length))
    return run_in_pieces(
        model_step(model), dict(model.named_parameters()), embeds, random_state(model, batch), cuts, mask
    )


@cache
def whole(name: str, length: int) -> dict[str, Tensor]:
    """What a family's model in float64 makes of a text that it reads at once."""
    return law(build(BY_NAME[name], torch.float64), length, [])


def padded(batch_of_patterns: list[str]) -> Tensor:
    """Masks from words of x (real) and . (padding)."""
    return torch.tensor([[letter == "x" for letter in word] for word in batch_of_patterns]).long()


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("length", LENGTHS)
def test_the_pieces_equal_the_whole(family: Family, length: int) -> None:
    model = build(family, torch.float64)
    assert_equal_up_to(1e-11, law(model, length, LENGTHS[length]), whole(family.name, length))


@pytest.mark.thinned(7)
@every_variant
@pytest.mark.parametrize("length", [3, 65])
def test_the_pieces_equal_the_whole_in_every_variant(family: Family, variant: str, length: int) -> None:
    model = build(family, torch.float64, **family.variants[variant])
    assert_equal_up_to(1e-10, law(model, length, LENGTHS[length]), law(model, length, []))


@pytest.mark.thinned(5)
@every_family
@settings(max_examples=3)
@given(data=st.data())
def test_any_split_equals_the_whole(family: Family, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 100))
    cuts = data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=5).map(sorted))
    double = build(family, torch.float64)
    assert_equal_up_to(1e-11, law(double, length, cuts), law(double, length, []))
    single = build(family)
    assert_equal_up_to(2e-4, law(single, length, cuts), law(single, length, []))


@pytest.mark.thinned(5)
@every_variant
@pytest.mark.parametrize("length", [1, 3, 20])
def test_the_model_equals_a_loop_over_the_equations(family: Family, variant: str, length: int) -> None:
    model = build(family, torch.float64, **family.variants[variant])
    embeds, state = model.get_input_embeddings()(random_tokens(2, length)), random_state(model, 2)
    parameters = dict(model.named_parameters())

    def loop(embeds: Tensor, mask: Tensor | None, state: Any) -> Any:
        return family.loop(model, embeds, state)

    assert_equal_up_to(
        1e-10,
        run_in_pieces(model_step(model), parameters, embeds, state),
        run_in_pieces(loop, parameters, embeds, state),
    )


@every_family
def test_float32_stays_close_to_float64(family: Family) -> None:
    single = law(build(family), 200, [])
    double = law(build(family).double(), 200, [])
    assert_equal_up_to(2e-4, {name: value.double() for name, value in single.items()}, double)


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("length", [3, 65])
def test_the_law_holds_in_training(family: Family, checkpointed: bool, length: int) -> None:
    expected = whole(family.name, length)
    model = build(family, torch.float64).train()
    for module in model.modules():
        if checkpointed and hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = CountedCheckpoint()
    assert_equal_up_to(1e-11, law(model, length, sorted({1, length // 2})), expected)
    assert_equal_up_to(1e-11, law(model, length, []), expected)
    if checkpointed:
        calls = [m._gradient_checkpointing_func.calls for m in model.base_model.layers]
        assert calls == [len({1, length // 2}) + 2] * len(calls)


class CountedCheckpoint:
    """Non-reentrant checkpointing that counts its calls: a layer that bypasses it would pass unseen."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, function: Any, *args: Any) -> Any:
        self.calls += 1
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


PATTERNS = ["..xxxxxxxxx", "xxxxxxxxx..", "x.xx...xxxx", "...........", "xxxxxxxxxxx", "..........x", ".x........."]


def with_padding(model: Any, step: Any, cuts: list[int]) -> dict[str, Tensor]:
    """What `step` makes of rows with padding."""
    mask = padded(PATTERNS)
    embeds, state = model.get_input_embeddings()(random_tokens(*mask.shape)), random_state(model, len(mask))
    return run_in_pieces(step, dict(model.named_parameters()), embeds, state, cuts, mask)


@cache
def without_padding(name: str) -> dict[str, Tensor]:
    """The truth: each row alone by the family's equations, its padding cut out."""
    family = BY_NAME[name]
    model = build(family, torch.float64)

    def only_real_tokens(embeds: Tensor, mask: Tensor | None, state: Any) -> Any:
        assert mask is not None
        logits, finals = [], []
        for row in range(len(mask)):
            row_state = map_state(lambda part, row=row: part[row : row + 1], state)
            real = mask[row].bool()
            row_logits = embeds.new_zeros(mask.shape[1], model.config.vocab_size)
            if real.any():
                out, row_state = family.loop(model, embeds[row : row + 1, real], row_state)
                row_logits = row_logits.masked_scatter(real[:, None], out[0])
            logits.append(row_logits)
            finals.append(row_state)
        return torch.stack(logits), concatenate_rows(finals)

    return with_padding(model, only_real_tokens, [])


@pytest.mark.thinned(7)
@every_family
@pytest.mark.parametrize("cuts", [[], [1, 5], [2, 3, 10]], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train, checkpointed"])
def test_the_law_holds_with_padding_on_either_side_and_inside(family: Family, cuts: list[int], training: bool) -> None:
    model = build(family, torch.float64).train(training)
    if training:
        for layer in model.base_model.layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, CountedCheckpoint()
    found = with_padding(model, model_step(model), cuts)
    assert_equal_up_to(1e-11, found, without_padding(family.name))


@every_family
def test_the_law_holds_under_bf16_autocast(family: Family) -> None:
    model = build(family).train()
    exact = law(model, 65, [])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = law(model, 65, [])
        pieces = law(model, 65, [1, 2, 33])
    assert whole["logits"].dtype == torch.float32
    assert {value.dtype for name, value in whole.items() if "final" in name} == {torch.float32}
    for name, value in exact.items():
        if value.numel() == 0:
            continue
        scale = value.norm()
        assert (whole[name] - value).norm() < family.autocast_error * scale, name
        assert (pieces[name] - whole[name]).norm() < 0.6 * family.autocast_error * scale, name
    assert (whole["logits"] - exact["logits"]).norm() > 1e-4 * exact["logits"].norm()  # bf16 was in use


@every_family
def test_a_bf16_model_keeps_the_law_and_float32_states(family: Family) -> None:
    model = build(family, torch.bfloat16)
    tokens = random_tokens(2, 65)
    whole = model(tokens)
    assert {part.dtype for layer in whole.final_state for part in layer} == {torch.float32}
    state, logits = None, []
    for piece in tokens.split([1, 2, 30, 32], dim=1):
        output = model(piece, initial_state=state)
        state = output.final_state
        logits.append(output.logits)
    assert (torch.cat(logits, 1) - whole.logits).norm() < 0.03 * whole.logits.norm()
    for ours, theirs in zip(state, whole.final_state, strict=True):
        assert (ours.recurrent - theirs.recurrent).norm() < 0.03 * theirs.recurrent.norm()


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_state_is_the_zero_state_bit_for_bit(family: Family, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    mask = padded(["..xxx", "xxx..", "xxxxx"])
    for attention_mask in (None, mask):
        without = model(random_tokens(3, 5), attention_mask=attention_mask)
        with_zero = model(random_tokens(3, 5), attention_mask=attention_mask, initial_state=model.zero_state(3))
        assert torch.equal(without.logits, with_zero.logits)
        for ours, theirs in zip(without.final_state, with_zero.final_state, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.thinned(7)
@every_family
@pytest.mark.parametrize("length", [1, 2, 70])
@pytest.mark.parametrize("mode", ["eval", "train", "checkpointed", "padded"])
def test_the_state_of_the_caller_is_never_changed(family: Family, length: int, mode: str) -> None:
    model = build(family).train(mode != "eval")
    if mode == "checkpointed":
        for layer in model.base_model.layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, CountedCheckpoint()
    state = map_state(torch.Tensor.requires_grad_, random_state(model, 2))
    before = clone_state(state)
    versions = [part._version for layer in state for part in layer]
    mask = torch.ones(2, length).long()
    if mode == "padded":
        mask[1, 0] = 0
    output = model(random_tokens(2, length), attention_mask=mask, initial_state=state, labels=random_tokens(2, length))
    (output.logits.sum() + sum(part.sum() for layer in output.final_state for part in layer)).backward()
    assert [part._version for layer in state for part in layer] == versions
    assert all(torch.equal(a, b) for x, y in zip(state, before, strict=True) for a, b in zip(x, y, strict=True))


@every_family
def test_a_final_state_shares_no_memory_with_its_inputs_and_keeps_no_large_tensor_alive(family: Family) -> None:
    model = build(family)
    state = random_state(model, 2)
    for length in (1, 2, 150):
        with torch.no_grad():
            final = model(random_tokens(2, length), initial_state=state).final_state
        given = {part.untyped_storage().data_ptr() for layer in state for part in layer}
        for layer in final:
            for part in (part for part in layer if part.numel()):
                assert part.untyped_storage().data_ptr() not in given
                assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@every_family
def test_evaluation_holds_the_outputs_of_two_layers_at_most(family: Family) -> None:
    model, outputs, alive = build(family, num_hidden_layers=6), [], []

    def watch(module: Any, inputs: Any, output: Any) -> None:
        outputs.append(weakref.ref(output[0]))
        alive.append(sum(reference() is not None for reference in outputs))

    for layer in model.base_model.layers:
        layer.register_forward_hook(watch)
    with torch.no_grad():
        model(random_tokens(1, 3))
    assert len(alive) == 6
    assert max(alive) <= 2


@every_family
def test_cutting_the_graph_between_pieces_is_up_to_the_caller(family: Family) -> None:
    model = build(family).train()
    embeds = model.get_input_embeddings()(random_tokens(1, 6)).detach().requires_grad_()
    first = model(inputs_embeds=embeds[:, :3]).final_state
    carried = model(inputs_embeds=embeds[:, 3:], initial_state=first).logits.sum()
    (gradient,) = torch.autograd.grad(carried, embeds)
    assert (gradient[:, :3].abs().sum(-1) > 0).all()
    cut = model(inputs_embeds=embeds[:, 3:], initial_state=map_state(torch.Tensor.detach, first)).logits.sum()
    (gradient,) = torch.autograd.grad(cut, embeds)
    assert (gradient[:, :3] == 0).all()
