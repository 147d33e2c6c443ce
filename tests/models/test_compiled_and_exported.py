"""torch.compile and torch.export: the same values, states and gradients, and one graph for all lengths."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.export import Dim

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, map_state

from .families import (
    FAMILIES,
    GLA,
    MAMBA,
    MAMBA2,
    RWKV6,
    RWKV7,
    Family,
    build,
    random_state,
    random_tokens,
    variant_id,
)

LENGTHS = (7, 70, 131)  # below, above and far above the chunks

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
one_for_each_scan = pytest.mark.parametrize("family", [MAMBA, MAMBA2, GLA, RWKV7], ids=variant_id)
# without gradients or a state; the delta rule has the operator of a step in the tests around
two_kinds_of_chunks = pytest.mark.parametrize("family", [MAMBA2, GLA], ids=variant_id)


# torch.compile and torch.export run into deprecation warnings of torch itself
def compiling(test: Any) -> Any:
    for category in ("DeprecationWarning", "FutureWarning:torch"):
        test = pytest.mark.filterwarnings(f"ignore::{category}")(test)
    return test


def short(family: Family) -> Any:
    """A model of one layer, or of two where the second reads what the first has computed, or torch cannot load one."""
    two = variant_id(family) in ("rwkv7", "hgrn2")
    return build(family, dtype=torch.float64, num_hidden_layers=2 if two else 1)


def results(run: Any, model: Any, length: int, state: RecurrentState, **options: Any) -> dict[str, Tensor]:
    """What a step gives: loss, logits, states, and the gradients of all parameters and of the initial state."""
    model.zero_grad()
    tokens, state = random_tokens(2, length), map_state(lambda part: part.clone().requires_grad_(), state)
    output = run(tokens, initial_state=state, **options)
    loss = output["logits"].square().mean() + sum(part.sum() for layer in output["final_state"] for part in layer)
    if "labels" in output:
        loss = loss + output["loss"]
    loss.backward()
    found = {"logits": output["logits"].detach()}
    for index, (layer, initial) in enumerate(zip(output["final_state"], state, strict=True)):
        for name, after, before in zip(LayerState._fields, layer, initial, strict=True):
            found |= {f"{name} {index}": after.detach(), f"gradient of {name} {index}": before.grad}
    parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert parameters
    return found | parameters


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        assert value is None or (value - found[name]).norm() <= error * value.norm(), name


def compiled_equals_eager(model: Any, backend: str, lengths: tuple[int, ...]) -> Any:
    """The number of graphs, each with a backward pass."""
    model.train()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=len(lengths) > 1)
    for length in lengths:
        tokens, state = random_tokens(2, length), random_state(model, 2)
        found = results(compiled, model, length, state, labels=tokens)
        assert_same(found, results(model, model, length, state, labels=tokens), 1e-9)
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@compiling
@one_for_each_scan
def test_a_step_is_one_graph_for_all_lengths(family: Family) -> None:
    assert compiled_equals_eager(short(family), "aot_eager", LENGTHS) == 1


@pytest.mark.slow
@compiling
@two_kinds_of_chunks
def test_reading_a_whole_text_is_one_graph_for_all_lengths(family: Family) -> None:
    model = short(family)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in LENGTHS:
        tokens = random_tokens(2, length)
        with torch.no_grad():
            found, expected = (run(tokens, use_cache=False) for run in (compiled, model))
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.final_state, expected.final_state)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@compiling
@pytest.mark.parametrize("family", [MAMBA2], ids=variant_id)
def test_inductor_compiles_a_step(family: Family) -> None:
    compiled_equals_eager(build(family, dtype=torch.float64, num_hidden_layers=1), "inductor", (70,))


@pytest.mark.slow
@compiling
@pytest.mark.parametrize("family", [MAMBA2, RWKV6], ids=variant_id)
def test_padding_and_activation_checkpointing_are_in_the_graph(family: Family) -> None:
    model = short(family).train()
    mask = torch.ones(2, 70).long()
    mask[0, :2] = 0
    state = random_state(model, 2)
    expected = results(model, model, 70, state, attention_mask=mask)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, model, 70, state, attention_mask=mask), expected, 1e-9)


def exported(model: Any, state: RecurrentState | None, strict: bool = False) -> Any:
    """The module of a program that was saved and loaded, for any length."""
    options = {} if state is None else {"initial_state": state}
    shapes: dict[str, Any] = {"input_ids": {1: Dim.DYNAMIC}}
    shapes |= {name: map_state(lambda _: {}, value) for name, value in options.items()}  # type: ignore[arg-type, return-value]
    program = torch.export.export(model, (random_tokens(2, 70),), options, dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue())).module()


@pytest.mark.slow
@compiling
@every_family
def test_a_program_is_exported_for_any_length(family: Family) -> None:
    model = short(family)
    state = random_state(model, 2)
    loaded = exported(model, state)
    for length in LENGTHS:
        assert_same(results(loaded, loaded, length, state), results(model, model, length, state), 1e-9)


@pytest.mark.slow
@compiling
@two_kinds_of_chunks
def test_a_program_without_a_state_gives_one(family: Family) -> None:
    model, tokens = short(family), random_tokens(2, 131)
    expected = model(tokens)
    for strict in (False, True):
        with torch.no_grad():
            found = exported(model, None, strict)(tokens)
        torch.testing.assert_close(found["logits"], expected.logits.detach())
        torch.testing.assert_close(found["final_state"], map_state(Tensor.detach, expected.final_state))


@every_family
def test_a_second_derivative_is_refused(family: Family) -> None:
    model, tokens = build(family, num_hidden_layers=1), random_tokens(2, 6)
    weight = model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(model(tokens).final_state[0].recurrent.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
