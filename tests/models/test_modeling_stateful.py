"""How long the backbone holds the states of its layers."""

import warnings
import weakref
from typing import Any

import pytest
import torch

from .families import SHELL_FAMILIES, Family, build, random_tokens, variant_id


@pytest.mark.thinned(5)
@pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
@pytest.mark.parametrize("rows", ["whole", "padded", "packed", "checkpointed"])
def test_states_that_nobody_asks_for_are_gone_before_the_next_layer(family: Family, rows: str) -> None:
    model: Any = build(family)
    arguments: dict[str, Any] = {}
    if rows == "padded":
        arguments["attention_mask"] = torch.ones(2, 9).tril(6).long()
    if rows == "packed":
        arguments["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])[None]
    if rows == "checkpointed":
        with warnings.catch_warnings(action="ignore"):  # of its name in later versions
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
    found: list[Any] = []
    alive: list[int] = []

    def before(*_: Any) -> None:
        alive.append(sum(reference() is not None for reference in found))

    def after(_: Any, __: Any, output: Any) -> None:
        groups = output[1] if isinstance(output[1][0], tuple) else [output[1]]
        found.extend(weakref.ref(part) for state in groups for part in state if part.numel())

    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    inputs = random_tokens(2, 9)
    with torch.set_grad_enabled(rows == "checkpointed"):  # the backward pass of a single token keeps its state
        output = model(inputs, output_final_state=True, **arguments)
        assert alive[1] > 0 or rows == "packed"  # where they are put together from those of the sequences
        del output
        found.clear()
        alive.clear()
        output = model(inputs, output_final_state=False, use_cache=False, **arguments)
    assert output.final_state is None
    assert alive == [0] * len(model.base_model.layers)
    assert found


@pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
def test_layers_of_one_shape_start_from_the_same_zeros(family: Family) -> None:
    """They are not held once for each layer, and a cache that is reset in `generate` does not overwrite them."""
    model: Any = build(family)
    seen: list[int] = []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((*args, *kwargs.values())[1].recurrent.data_ptr()), with_kwargs=True
        )
    with torch.no_grad():
        cache = model(random_tokens(2, 3), use_cache=True).past_key_values
    assert len(set(seen)) == 1
    expected = model(random_tokens(2, 1)).logits
    cache.set_in_generate(True)
    with torch.no_grad():
        model(random_tokens(2, 1), past_key_values=cache)
        cache.reset()
        torch.testing.assert_close(model(random_tokens(2, 1), past_key_values=cache).logits, expected)
