"""Wrapped models in circumstances of their own: copies with hooks, threads, the compiler, files from elsewhere."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.measures import pair, parts, random_state, random_tokens, read_in_pieces
from tests.hybrids.tiny_models import VOCABULARY, tiny_model

TOKENS = random_tokens(2, 9, seed=7)


def test_a_forward_on_the_object_is_refused() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model("falcon_h1")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    with pytest.raises(ValueError, match="hooks of accelerate"):
        stateful(model)


MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0, 0, 0]])
CALLS: list[tuple[str, list[dict[str, Any]]]] = [
    ("mamba", [{}, {}]),
    ("nemotron_h", [{"input_ids": TOKENS[:, :1]}] * 2),
    ("qwen3_next", [{"attention_mask": MASK}, {"attention_mask": MASK.flip(0)}]),
    ("qwen3_next", [{"attention_mask": MASK}, {}]),
]


@pytest.mark.parametrize(("name", "calls"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("models", [1, 2])
def test_threads_do_not_meet_in_exchanged_functions_and_padding(name: str, calls: Any, models: int) -> None:
    wrapped: list[Any] = [stateful(tiny_model(name)).eval() for _ in range(models)]
    state = wrapped[0](TOKENS, output_final_state=True).final_state
    barrier = Barrier(2)

    @torch.no_grad()
    def read(model: Any, given: dict[str, Any]) -> list[Tensor]:
        output = model(**{"input_ids": TOKENS} | given, initial_state=state, output_final_state=True)
        return [output.logits, *parts(output.final_state)]

    def meet(module: Any, inputs: Any) -> None:
        barrier.wait(10)

    each = [(wrapped[0], calls[0]), (wrapped[-1], calls[1])]
    expected = [read(*one) for one in each]
    for model in wrapped:  # in the midst of each other's pass, once before and once after the first layer
        for layer in model.base_model.layers[:2]:
            layer.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        actual = list(pool.map(read, *zip(*each, strict=True)))
    torch.testing.assert_close(actual, expected)


def test_an_adapter_that_the_stock_mixer_reads_past_is_refused() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=8, state_size=4, num_hidden_layers=1)
    model = get_peft_model(stateful(MambaForCausalLM(config)), LoraConfig(r=2, target_modules=["dt_proj"]))
    with pytest.raises(ValueError, match="adapter on dt_proj of layer 0 has no effect, since MambaMixer of Tra"):
        model(input_ids=TOKENS, output_final_state=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own internals
@pytest.mark.parametrize("name", ["falcon_h1", "kimi_linear", "lfm2", "minimax", "xlstm", "zamba", "zaya"])
def test_a_compiled_model_gives_what_the_uncompiled_one_gives(name: str) -> None:
    torch._dynamo.reset()
    model = stateful(tiny_model(name))
    compiled = torch.compile(model, backend="eager")
    ids = random_tokens(2, 20)
    with torch.no_grad():
        for run in (model, compiled):
            whole = run(ids, use_cache=False)
            first = run(ids[:, :12], output_final_state=True)
            second = run(ids[:, 12:], initial_state=first.final_state)
            if run is model:
                expected, expected_whole = second, whole
    torch.testing.assert_close(whole.logits, expected_whole.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.logits, expected.logits)
    torch.testing.assert_close(second.final_state, expected.final_state)


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize(
    "model_type",
    ["falcon_h1", "jamba", "kimi_linear", "mamba2", "minimax", "nemotron_h", "qwen3_next", "xlstm", "zaya"],
)
def test_in_bfloat16_states_stay_float32_and_carry(model_type: str) -> None:
    """As near to the float32 model of the same weights as the stock model is; rounding may move a router's choice."""
    found = []
    for seed in range(4):
        stock = tiny_model(model_type, seed=seed).bfloat16()
        model, tokens = stateful(copy.deepcopy(stock)), random_tokens(2, 12, seed=seed)
        exact = copy.deepcopy(stock).float()(input_ids=tokens).logits
        logits, state = read_in_pieces(model, tokens, (5, 1, 6))
        assert {part.dtype for part in parts(state)} == {torch.float32}
        others = logits, stock(input_ids=tokens).logits, model(input_ids=tokens[:, 6:]).logits
        own, stocks, restarted = ((x.float()[:, -6:] - exact[:, -6:]).square().mean(-1).median() for x in others)
        found.append(torch.stack([own, stocks, restarted]))
    own, stocks, restarted = torch.stack(found).median(0).values
    assert own < 2 * stocks
    assert own < 0.02 * restarted


def test_under_autocast_states_stay_float32() -> None:
    _, model = pair("falcon_h1")
    state = random_state(model, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = model.train()(input_ids=random_tokens(2, 6), initial_state=state, output_final_state=True)
    assert {part.dtype for part in parts(output.final_state)} == {torch.float32}
    gradients = torch.autograd.grad(output.logits.float().sum(), parts(state))
    assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in gradients)
