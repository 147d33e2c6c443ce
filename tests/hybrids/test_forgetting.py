"""Wrapped models of Transformers that forget, against our own classes of the same weights and restarts of a layer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.verify import read_in_pieces
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM, StatefulMambaForCausalLM
from tests.hybrids.measures import random_tokens
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

OURS = {
    "mamba": StatefulMambaForCausalLM,
    "falcon_mamba": StatefulMambaForCausalLM,
    "mamba2": StatefulMamba2ForCausalLM,
}
FORGETFUL = [
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "mamba",
    "mamba2",
    "nemotron_h",
    "zamba",
    "zamba2",
]
REFUSAL = "cannot be made to forget"
QUICK = {"falcon_h1", "jamba", "mamba2", "nemotron_h"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FORGETFUL]
SETTINGS = [
    {"retention": 0.9, "insertion": 0.5},
    {"delta_scale": 0.5},
    {"retention": 0.95, "insertion": 0.75, "delta_scale": 0.7},
]
every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def wrapped(model_type: str) -> Any:
    """A wrapped model whose layers remember: random ones forget by themselves."""
    model = tiny_model(model_type)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-3.0)
            elif parameter.ndim > 1 or name.endswith("dt_bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return stateful(model.eval())


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.thinned(5)
@every_setting
@pytest.mark.parametrize("model_type", OURS)
@torch.no_grad()
def test_wrapped_models_forget_what_our_classes_forget(model_type: str, settings: dict[str, Any]) -> None:
    model, tokens = wrapped(model_type), random_tokens(2, 40)
    ours = OURS[model_type](OURS[model_type].config_class.from_dict(model.config.to_dict()))
    ours.load_state_dict(model.state_dict())
    plain = model(tokens).logits
    with forgetting(model, **settings), forgetting(ours, **settings):
        expected = ours.eval()(tokens)
        output = model(tokens, output_final_state=True)
        assert error(model(tokens).logits, expected.logits) < 1e-5
    assert error(output.logits, expected.logits) < 1e-5
    assert error(output.logits, plain) > 1e-4
    for found, layer in zip(output.final_state, expected.final_state, strict=True):
        assert error(found.recurrent, layer.recurrent) < 1e-5


@pytest.mark.thinned(5)
@every_setting
@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_in_any_pieces_as_at_once(model_type: str, settings: dict[str, Any]) -> None:
    model, tokens = wrapped(model_type), random_tokens(2, 40)
    plain = model(tokens).logits
    with forgetting(model, **settings):
        whole, _ = read_in_pieces(model, tokens, [40])
        split, state = read_in_pieces(model, tokens, [1, 1, 2, 17, 1, 3, 15])
        assert [part.shape[1:] for layer in state for part in layer] == [s for x in model.state_shapes() for s in x]
    assert error(split, whole) < 1e-5
    assert error(whole, plain) > 1e-4


@pytest.mark.parametrize("model_type", [pytest.param("falcon_h1"), pytest.param("nemotron_h", marks=pytest.mark.slow)])
@torch.no_grad()
def test_generation_with_weaker_retention(model_type: str) -> None:
    model, prompt = wrapped(model_type).double(), random_tokens(2, 8)
    with forgetting(model, retention=0.5, insertion=0.5):
        tokens = prompt
        for _ in range(6):
            logits = read_in_pieces(model, tokens, [tokens.shape[1]])[0]
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        generated = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(generated, tokens)


def test_what_a_stock_cache_cannot_hold_is_refused() -> None:
    model, prompt = wrapped("falcon_h1"), random_tokens(1, 4)
    message = "takes no window, since the caches of Transformers hold no window; it is for Mamba-2"
    with pytest.raises(ValueError, match=message), forgetting(model, window=4):
        pass
    mamba1 = wrapped("jamba")
    with forgetting(mamba1, retention=0.9), pytest.raises(ValueError, match="Mamba-1 step cannot be replaced"):
        mamba1.generate(prompt, max_new_tokens=2)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model_type", sorted(set(SUPPORTED_TYPES) - set(FORGETFUL)))
def test_other_recurrences_are_refused(model_type: str) -> None:
    model = stateful(tiny_model(model_type))
    with pytest.raises(ValueError, match=REFUSAL), forgetting(model, retention=0.9):
        pass
    model.config.forgetting = {"retention": 0.9}
    with pytest.raises(ValueError, match=REFUSAL):
        model(random_tokens(1, 4))


def test_a_config_that_forgets_is_honored_when_a_model_is_wrapped() -> None:
    stock = tiny_model("falcon_h1")
    stock.config.forgetting = {"retention": 1.5}
    with pytest.raises(ValueError, match="retention must be above 0 and at most 1"):
        stateful(stock)
    delta = tiny_model("qwen3_next")
    delta.config.forgetting = {"retention": 0.9}
    with pytest.raises(ValueError, match="cannot be made to forget"):
        stateful(delta)
