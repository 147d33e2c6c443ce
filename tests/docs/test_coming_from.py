"""What the page on other libraries says of stock models of Transformers, run: a release that changes it fails here."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.hybrids.tiny_models import VOCABULARY, tiny_model

RIGHT = ["bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "zamba2"]
STOPPED = [
    "bailing_hybrid",
    "kimi_linear",
    "lara_mini",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
]
DROPPED = ["mamba", "falcon_mamba", "jamba", "zamba"]
QUICK = ("mamba2", "qwen3_5_text", "mamba")
IDS = torch.randint(3, VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(0))


def each(*types: str) -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in types]


def difference(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def read_on(model: PreTrainedModel, cache: DynamicCache, start: int, stop: int) -> Tensor:
    """Logits of the tokens from `start` to before `stop`, after those in the cache."""
    positions = {"position_ids": torch.arange(start, stop)[None]} if model.config.model_type == "bamba" else {}
    return model(input_ids=IDS[:, start:stop], cache=cache, use_cache=True, **positions).logits


def detach(cache: DynamicCache) -> None:
    """By hand, as a user of the stock cache has to."""
    for layer in cache.layers:
        for states in (getattr(layer, "recurrent_states", {}), getattr(layer, "conv_states", {})):
            states.update({index: state.detach().clone() for index, state in states.items() if state is not None})
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()


@pytest.mark.parametrize("model_type", each(*RIGHT, *STOPPED, *DROPPED))
def test_the_stock_cache_carries_states_over_chunks_but_not_those_of_mamba_1(model_type: str) -> None:
    model = tiny_model(model_type)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(input_ids=IDS, use_cache=False).logits
        chunks = torch.cat([read_on(model, cache, start, start + 16) for start in (0, 16, 32)], dim=1)
    error = difference(chunks, whole)
    assert (error > 1e-4) if model_type in DROPPED else (error < 5e-6)


@pytest.mark.parametrize("model_type", each(*RIGHT))
def test_gradients_through_the_stock_cache_are_right_without_a_delta_rule(model_type: str) -> None:
    model = tiny_model(model_type).train()
    model(input_ids=IDS, use_cache=False).logits[:, 16:].square().mean().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    cache = DynamicCache(config=model.config)
    read_on(model, cache, 0, 16)
    read_on(model, cache, 16, 48).square().mean().backward()
    found = dict(model.named_parameters())
    assert max(difference(found[name].grad, gradient) for name, gradient in expected.items()) < 1e-5


@pytest.mark.parametrize("detached", [False, True], ids=["one-graph", "tbtt"])
@pytest.mark.parametrize("model_type", each(*STOPPED))
def test_the_stock_cache_stops_the_backward_pass_of_delta_rules(model_type: str, detached: bool) -> None:
    model = tiny_model(model_type).train()
    cache = DynamicCache(config=model.config)
    first = read_on(model, cache, 0, 16)
    if detached:
        first.square().mean().backward()
        detach(cache)
    loss = read_on(model, cache, 16, 48).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("model_type", each(*RIGHT, *STOPPED, *DROPPED))
def test_activation_checkpointing_drops_the_stock_cache(model_type: str) -> None:
    model = tiny_model(model_type).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    cache = DynamicCache(config=model.config)
    read_on(model, cache, 0, 16)
    positions = {"position_ids": torch.arange(16, 48)[None]} if model_type == "bamba" else {}
    alone = model(input_ids=IDS[:, 16:], use_cache=False, **positions).logits
    assert difference(read_on(model, cache, 16, 48), alone) < 5e-6


def test_a_stock_model_ignores_an_initial_state() -> None:
    model = tiny_model("mamba2")
    state = tuple(torch.ones(2, 8, 8, 6) for _ in range(3))
    assert torch.equal(model(input_ids=IDS, initial_state=state).logits, model(input_ids=IDS).logits)
