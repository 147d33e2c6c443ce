"""Wrapped models in circumstances of their own: copies with hooks, threads, files from elsewhere."""

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.measures import random_tokens
from tests.hybrids.tiny_models import VOCABULARY, tiny_model

TOKENS = random_tokens(2, 9, seed=7)


def test_a_model_whose_hooks_refer_to_it_is_pickled() -> None:
    model: Any = stateful(tiny_model("mamba"))
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(*(x(TOKENS, output_final_state=True).logits for x in (model, copied)))


def test_a_forward_on_the_object_is_refused() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model("falcon_h1")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    with pytest.raises(ValueError, match="hooks of accelerate"):
        stateful(model)


@pytest.mark.parametrize(
    ("name", "length", "function"),
    [("mamba", 9, "mamba_selective_scan"), ("nemotron_h", 1, "mamba2_selective_state_update")],
)
def test_threads_do_not_meet_in_exchanged_functions(name: str, length: int, function: str) -> None:
    wrapped: list[Any] = [stateful(tiny_model(name)).eval() for _ in range(2)]
    module = sys.modules[type(wrapped[0]).__module__]
    before = getattr(module, function)
    tokens, barrier = TOKENS[:, :length], Barrier(2)
    states = [model(TOKENS, output_final_state=True).final_state for model in wrapped]

    @torch.no_grad()
    def read(model: Any, state: Any) -> Tensor:
        return model(tokens, initial_state=state).logits

    def meet(module: Any, inputs: Any) -> None:
        barrier.wait(10)

    expected = list(map(read, wrapped, states))
    for model in wrapped:  # in the midst of each other's pass, once before and once after the first layer
        for layer in model.base_model.layers[:2]:
            layer.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        actual = list(pool.map(read, wrapped, states))
    torch.testing.assert_close(actual, expected)
    assert getattr(module, function) is before


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "nemotron_h"])  # the last two widen their logits
def test_half_precision_models_are_wrapped(name: str) -> None:
    model: Any = stateful(tiny_model(name).to(torch.bfloat16))
    assert model(TOKENS, output_final_state=True).final_state[0].recurrent.dtype == torch.float32


def test_an_adapter_that_the_stock_mixer_reads_past_is_refused() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=8, state_size=4, num_hidden_layers=1)
    model = get_peft_model(stateful(MambaForCausalLM(config)), LoraConfig(r=2, target_modules=["dt_proj"]))
    with pytest.raises(ValueError, match=r"adapter on .*dt_proj has no effect, since MambaForCausalLM"):
        model(input_ids=TOKENS, output_final_state=True)
