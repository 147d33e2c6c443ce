"""The core law of whole models: any split of rows in any form equals each of their sequences by the equations."""

import copy
import warnings
import weakref
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import clone_state, concatenate_rows, keep_rows, map_state, take_rows
from tests.row_forms import KINDS, forms_of, numbers_of, real_of, rows, splits

from .families import FAMILIES, SHELL_FAMILIES, VARIANTS, Family, build, random_state, random_tokens, variant_id
from .family_fla import HGRN2, LINEAR_ATTENTION
from .law import Step, assert_equal_up_to, checkpointed, model_step, run_in_chunks

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
every_variant = pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=variant_id)


def law(model: Any, length: int, cuts: list[int]) -> dict[str, Tensor]:
    embeds = model.get_input_embeddings()(random_tokens(2, length))
    return run_in_chunks(model_step(model), dict(model.named_parameters()), embeds, random_state(model, 2), cuts)


def by_the_equations(family: Family, model: Any) -> Step:
    """Each sequence by itself, the first of a row from the state of the row and others from zero."""

    def step(embeds: Tensor, numbers: Tensor | None, state: Any) -> Any:
        assert numbers is not None
        logits, finals = embeds.new_zeros(*numbers.shape, model.config.vocab_size), []
        for row, own in enumerate(numbers):
            carried = take_rows(state, slice(row, row + 1))
            for index, number in enumerate(sorted({*own.tolist()} - {0})):
                places = (own == number).nonzero()[:, 0]
                carried = map_state(torch.zeros_like, carried) if index else carried
                found, carried = family.loop(model, embeds[row : row + 1, places], carried)
                logits = logits.index_put((torch.tensor(row), places), found[0])
            finals.append(carried)
        return logits, concatenate_rows(finals)

    return step


class InChunks:
    """A step of a model that gets sequences in one form, and drops states where one begins with a chunk."""

    def __init__(self, model: Any, form: str, **options: Any) -> None:
        self.model, self.form, self.options, self.before = model, form, options, torch.zeros(1)

    def __call__(self, embeds: Tensor, numbers: Tensor | None, state: Any) -> Any:
        assert numbers is not None
        first = numbers.gather(1, (numbers > 0).long().argmax(1, keepdim=True))[:, 0]
        state = keep_rows(state, (self.before == 0) | (first == 0) | (first == self.before))
        self.before = torch.maximum(self.before, numbers.amax(1))
        words = ["".join("." if number == 0 else chr(96 + number) for number in row) for row in numbers.tolist()]
        forms = forms_of(words)
        rows = forms.get(self.form, forms["position_ids"])
        output = self.model(inputs_embeds=embeds, initial_state=state, **rows, **self.options)
        return output.logits, output.final_state


@lru_cache(maxsize=2)
def model_of(name: str, variant: str) -> Any:
    family = next(family for family in FAMILIES if family.name == name)
    return build(family, torch.float64, **family.variants[variant])


@pytest.mark.thinned(17)
@every_variant
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2)
@given(data=st.data())
def test_any_split_of_any_rows_is_each_sequence_by_the_equations(
    family: Family, variant: str, kind: str, data: st.DataObject
) -> None:
    words = data.draw(rows(kind))
    cuts, form = data.draw(splits(len(words[0]))), data.draw(st.sampled_from(sorted(forms_of(words))))
    options = {"output_hidden_states": data.draw(st.booleans())}
    model = model_of(family.name, variant)
    parameters, numbers = dict(model.named_parameters()), numbers_of(words) * real_of(words)
    embeds, state = model.get_input_embeddings()(random_tokens(*numbers.shape)), random_state(model, len(words))
    expected = run_in_chunks(by_the_equations(family, model), parameters, embeds, state, (), numbers)
    runner = checkpointed(copy.deepcopy(model)) if data.draw(st.booleans()) else model
    parameters = dict(runner.named_parameters())
    found = run_in_chunks(InChunks(runner, form, **options), parameters, embeds, state, cuts, numbers)
    assert_equal_up_to(1e-10, found, expected)


@pytest.mark.thinned(5)
@every_family
@settings(max_examples=4)
@given(data=st.data())
def test_any_split_of_a_long_text_equals_the_whole(family: Family, data: st.DataObject) -> None:
    """Over the chunks of scans, also in training; and in float32."""
    length = data.draw(st.integers(60, 200))
    cuts = data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=5).map(sorted))
    double = build(family, torch.float64)
    whole = law(double, length, [])
    assert_equal_up_to(1e-11, law(checkpointed(double) if data.draw(st.booleans()) else double, length, cuts), whole)
    single = build(family)
    assert_equal_up_to(2e-4, law(single, length, cuts), law(single, length, []))


@pytest.mark.thinned(5)
@every_family
def test_float32_stays_close_to_float64(family: Family) -> None:
    single = law(build(family), 200, [])
    double = law(build(family).double(), 200, [])
    assert_equal_up_to(2e-4, {name: value.double() for name, value in single.items()}, double)


@pytest.mark.thinned(5)
@every_family
def test_the_law_holds_under_bf16_autocast(family: Family) -> None:
    model = build(family).train()
    exact = law(model, 65, [])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = law(model, 65, [])
        chunks = law(model, 65, [1, 2, 33])
    assert whole["logits"].dtype == torch.float32
    assert {value.dtype for name, value in whole.items() if "final" in name} == {torch.float32}
    for name, value in exact.items():
        scale = value.norm()
        assert (whole[name] - value).norm() <= family.autocast_error * scale, name
        assert (chunks[name] - whole[name]).norm() <= 0.6 * family.autocast_error * scale, name
    assert (whole["logits"] - exact["logits"]).norm() > 1e-4 * exact["logits"].norm()  # bf16 was in use


@every_family
@torch.no_grad()
def test_a_bf16_model_keeps_the_law_and_float32_states(family: Family) -> None:
    model, tokens = build(family, torch.bfloat16), random_tokens(2, 65)
    whole = model(tokens)
    assert {part.dtype for layer in whole.final_state for part in layer} == {torch.float32}
    state, logits = None, []
    for chunk in tokens.split([1, 2, 30, 32], dim=1):
        output = model(chunk, initial_state=state)
        state = output.final_state
        logits.append(output.logits)
    assert (torch.cat(logits, 1) - whole.logits).norm() < 0.03 * whole.logits.norm()
    for ours, theirs in zip(state, whole.final_state, strict=True):
        assert (ours.recurrent - theirs.recurrent).norm() < 0.03 * theirs.recurrent.norm()


def check_float16(family: Family, **changes: Any) -> None:
    model, tokens = build(family, torch.float16, **changes), random_tokens(4, 40)
    with torch.no_grad():
        logits = model(tokens).logits
        expected = model.float()(tokens).logits
    assert (logits.float() - expected).norm() < family.autocast_error * expected.norm()


@pytest.mark.thinned(3)
@every_variant
def test_float16_is_finite_and_close_to_float32(family: Family, variant: str) -> None:
    check_float16(family, **family.variants[variant])


@pytest.mark.parametrize("feature_map", ["elu", "relu", "identity", "dpfp", "hedgehog", "t2r", "elementwise_product"])
def test_normalized_linear_attention_is_finite_in_float16(feature_map: str) -> None:
    """Also where no feature of the first token is positive: the normalizer is 0, and its epsilon is none."""
    check_float16(LINEAR_ATTENTION, feature_map=feature_map, norm_feature_map=True)


@torch.no_grad()
def test_long_sums_of_linear_attention_do_not_overflow_in_float16() -> None:
    """Without decay outputs grow with the length, beyond the range of float16; the norm after them takes that away."""
    model = build(LINEAR_ATTENTION, torch.float16)
    state = map_state(lambda part: part + 1e6, model.zero_state(1))
    assert bool(model(random_tokens(1, 3), initial_state=state).logits.isfinite().all())


@pytest.mark.parametrize("layer", [0, 1])
def test_lower_bounds_have_gradients_also_where_they_round_to_0_or_1(layer: int) -> None:
    model = HGRN2.causal_lm_class(HGRN2.config(num_hidden_layers=3))
    with torch.no_grad():
        model.model.lower_bounds[layer] = -200.0
    tokens = torch.arange(18).view(2, 9)
    model(tokens, labels=tokens).loss.backward()
    assert model.model.lower_bounds.grad.isfinite().all()


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_state_is_the_zero_state_bit_for_bit(family: Family, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    for mask in (None, torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1] * 5])):
        without = model(random_tokens(3, 5), attention_mask=mask)
        with_zero = model(random_tokens(3, 5), attention_mask=mask, initial_state=model.zero_state(3))
        assert torch.equal(without.logits, with_zero.logits)
        torch.testing.assert_close(without.final_state, with_zero.final_state, rtol=0, atol=0)


@pytest.mark.thinned(7)
@every_family
@pytest.mark.parametrize("length", [1, 2, 70])
@pytest.mark.parametrize("mode", ["eval", "checkpointed", "padded"])
def test_the_state_of_the_caller_is_never_changed_and_shares_no_memory(family: Family, length: int, mode: str) -> None:
    model = checkpointed(build(family)) if mode == "checkpointed" else build(family)
    state = map_state(torch.Tensor.requires_grad_, random_state(model, 2))
    before, versions = clone_state(state), [part._version for layer in state for part in layer]
    mask, tokens = torch.ones(2, length).long(), random_tokens(2, length)
    mask[1, 0] = int(mode != "padded")
    output = model(tokens, attention_mask=mask, initial_state=state, labels=tokens)
    (output.logits.sum() + sum(part.sum() for layer in output.final_state for part in layer)).backward()
    assert [part._version for layer in state for part in layer] == versions
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    with torch.no_grad():
        final = model(tokens, initial_state=state).final_state
    memory = {part.untyped_storage().data_ptr() for layer in state for part in layer}
    for part in (part for layer in final for part in layer if part.numel()):
        assert part.untyped_storage().data_ptr() not in memory
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()  # no large tensor stays


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("kind", ["whole", "padded", "packed", "checkpointed"])
def test_what_nobody_asks_for_is_gone_before_the_next_layer(family: Family, kind: str) -> None:
    """Outputs of layers but the last two, and states."""
    model: Any = build(family, num_hidden_layers=4)
    arguments: dict[str, Any] = {}
    if kind == "padded":
        arguments["attention_mask"] = torch.ones(2, 9).tril(6).long()
    if kind == "packed":
        arguments["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])[None]
    if kind == "checkpointed":
        with warnings.catch_warnings(action="ignore"):  # of its name in later versions
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
    states: list[Any] = []
    outputs: list[Any] = []
    alive: list[tuple[int, int]] = []

    def count(*_: Any) -> None:
        alive.append(tuple(sum(x() is not None for x in references) for references in (states, outputs)))  # type: ignore[arg-type]

    def after(_: Any, __: Any, output: Any) -> None:
        groups = output[1] if isinstance(output[1][0], tuple) else [output[1]]
        states.extend(weakref.ref(part) for state in groups for part in state if part.numel())
        outputs.append(weakref.ref(output[0] if isinstance(output[0], Tensor) else output[0][0]))

    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(count)
        layer.register_forward_hook(after)
    with torch.set_grad_enabled(kind == "checkpointed"):  # the backward pass of a single token keeps its state
        output = model(random_tokens(2, 9), output_final_state=False, use_cache=False, **arguments)
    assert output.final_state is None
    assert [held for held, _ in alive] == [0] * 4
    assert kind == "checkpointed" or max(held for _, held in alive) <= 1
    assert states


@pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
@torch.no_grad()
def test_layers_of_one_shape_start_from_the_same_zeros(family: Family) -> None:
    """They are not held once for each layer, and a cache that is reset in `generate` does not overwrite them."""
    model: Any = build(family)
    seen: list[int] = []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((*args, *kwargs.values())[1].recurrent.data_ptr()), with_kwargs=True
        )
    cache = model(random_tokens(2, 3), use_cache=True).past_key_values
    assert len(set(seen)) == 1
    expected = model(random_tokens(2, 1)).logits
    cache.set_in_generate(True)
    model(random_tokens(2, 1), past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(random_tokens(2, 1), past_key_values=cache).logits, expected)
