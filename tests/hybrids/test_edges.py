"""Wrapped models in circumstances of their own: copies with hooks, threads, files from elsewhere."""

import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.hybrids import load_hybrid_state, save_hybrid_state, stateful
from tests.hybrids.tiny_models import VOCABULARY, tiny_model

TOKENS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))


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


KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "not finite": lambda keys: keys * float("nan"),
    "other rows": lambda keys: keys[:1],
    "other heads": lambda keys: keys.repeat(1, 2, 1, 1),
    "other size": lambda keys: keys.repeat(1, 1, 1, 2),
    "other length": lambda keys: keys[:, :, :4],
    "integers": lambda keys: keys.int(),
}


def test_files_with_keys_of_another_model_or_a_damaged_header_are_refused(tmp_path: Path) -> None:
    model = stateful(tiny_model("falcon_h1")).eval()
    file, cache = tmp_path / "state", model.new_attention_cache()
    with torch.no_grad():
        state = model(TOKENS, output_final_state=True, attention_cache=cache).final_state
    save_hybrid_state(file, state, cache)
    with safe_open(file, framework="pt") as saved:
        header = saved.metadata()
        tensors = {key: saved.get_tensor(key) for key in saved.keys()}
    for change in KEYS.values():
        changed = {k: change(x).contiguous() if k.endswith(("keys", "values")) else x for k, x in tensors.items()}
        save_file(changed, file, header)
        with pytest.raises(ValueError, match="layer 0 has"):
            load_hybrid_state(file, model)
    damaged = [{k: v for k, v in header.items() if k != name} for name in ("format_version", "lengths", "metadata")]
    damaged += [header | {"lengths": value} for value in ("{", "[1]", "{}", '{"0": 500, "1": 500, "2": 500}')]
    for wrong in damaged:
        save_file(tensors, file, wrong)
        with pytest.raises(ValueError, match=str(file)):
            load_hybrid_state(file, model)


def test_a_cache_of_other_rows_is_not_saved(tmp_path: Path) -> None:
    model = stateful(tiny_model("falcon_h1")).eval()
    cache = model.new_attention_cache()
    with torch.no_grad():
        model(TOKENS, output_final_state=True, attention_cache=cache)
    with pytest.raises(ValueError, match="read the same text"):
        save_hybrid_state(tmp_path / "state", model.zero_state(1), cache)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "nemotron_h"])  # the last two widen their logits
def test_half_precision_models_are_wrapped(name: str) -> None:
    model: Any = stateful(tiny_model(name).to(torch.bfloat16))
    assert model(TOKENS, output_final_state=True).final_state[0].recurrent.dtype == torch.float32


def test_an_adapter_that_the_stock_mixer_reads_past_is_refused() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=8, state_size=4, num_hidden_layers=1)
    model = get_peft_model(stateful(MambaForCausalLM(config)), LoraConfig(r=2, target_modules=["dt_proj"]))
    with pytest.raises(ValueError, match=r"adapter on .*dt_proj has no effect, since MambaForCausalLM"):
        model(input_ids=TOKENS, output_final_state=True)
