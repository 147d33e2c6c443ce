"""Wrapped models in circumstances of their own: copies with hooks, threads, the compiler, files from elsewhere."""

import copy

import pytest
import torch

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.measures import pair, parts, random_state, random_tokens, read_in_chunks, relative_error
from tests.hybrids.tiny_models import tiny_model

TOKENS = random_tokens(2, 9, seed=7)


MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0, 0, 0]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own internals
@pytest.mark.parametrize("name", ["falcon_h1", "kimi_linear", "xlstm"])
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
    ["falcon_h1", "jamba", "kimi_linear", "mamba2", "minimax", "nemotron_h", "qwen3_next", "xlstm"],
)
def test_in_bfloat16_states_stay_float32_and_carry(model_type: str) -> None:
    """As near to the float32 model of the same weights as the stock model is; rounding may move a router's choice."""
    found = []
    for seed in range(4):
        stock = tiny_model(model_type, seed=seed).bfloat16()
        model, tokens = stateful(copy.deepcopy(stock)), random_tokens(2, 12, seed=seed)
        exact = copy.deepcopy(stock).float()(input_ids=tokens).logits
        logits, state = read_in_chunks(model, tokens, (5, 1, 6))
        assert {part.dtype for part in parts(state)} == {torch.float32}
        others = logits, stock(input_ids=tokens).logits, model(input_ids=tokens[:, 6:]).logits
        own, stocks, restarted = ((x.float()[:, -6:] - exact[:, -6:]).square().mean(-1).median() for x in others)
        found.append(torch.stack([own, stocks, restarted]))
    own, stocks, restarted = torch.stack(found).median(0).values
    assert own < 2 * stocks
    assert own < 0.02 * restarted


@torch.no_grad()
def test_xlstm_takes_padding_in_float16() -> None:
    model = stateful(tiny_model("xlstm").half())
    full = stateful(copy.deepcopy(model).float())
    arguments = {"attention_mask": MASK, "output_final_state": True}
    assert relative_error([model(TOKENS, **arguments).logits.float()], [full(TOKENS, **arguments).logits]) < 0.02


def test_under_autocast_states_stay_float32() -> None:
    _, model = pair("falcon_h1")
    state = random_state(model, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = model.train()(input_ids=random_tokens(2, 6), initial_state=state, output_final_state=True)
    assert {part.dtype for part in parts(output.final_state)} == {torch.float32}
    gradients = torch.autograd.grad(output.logits.float().sum(), parts(state))
    assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in gradients)
