"""In any pieces as at once: every supported model type against the stock model of the same weights."""

import copy
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from tests.hybrids.measures import (
    pair,
    parts,
    random_state,
    random_tokens,
    read_in_pieces,
    relative_error,
    state_of_stock_cache,
)
from tests.hybrids.support import TOLERANCE
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

# One type for each kind of mixer; the others run with the slow tests.
QUICK = {"falcon_h1", "kimi_linear", "lfm2", "minimax", "nemotron_h", "qwen3_next", "xlstm", "zamba", "zaya"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SUPPORTED_TYPES]
SLOW_TYPES = [pytest.param(name, marks=[] if name == "falcon_h1" else [pytest.mark.slow]) for name in SUPPORTED_TYPES]
LENGTHS = (1, 2, 3, 63, 64, 65, 200)


@torch.no_grad()
@pytest.mark.parametrize("model_type", SLOW_TYPES)
def test_outputs_and_states_of_any_length_are_the_stock_models(model_type: str) -> None:
    stock, model = pair(model_type)
    for length in LENGTHS:
        tokens = random_tokens(2, length)
        expected = stock(input_ids=tokens, use_cache=True)
        output = model(input_ids=tokens, output_final_state=True)
        assert relative_error([output.logits], [expected.logits]) < TOLERANCE, length
        expected_state = state_of_stock_cache(model, getattr(expected, cache_argument(model)))
        assert relative_error(parts(output.final_state), expected_state) < TOLERANCE, length


@torch.no_grad()
@pytest.mark.parametrize("model_type", SLOW_TYPES)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(cuts=st.sets(st.integers(1, 69), max_size=4))
def test_random_pieces_change_nothing(model_type: str, cuts: set[int]) -> None:
    stock, model = pair(model_type)
    tokens = random_tokens(2, 70)
    lengths = [stop - start for start, stop in pairwise([0, *sorted(cuts), 70])]
    logits, state = read_in_pieces(model, tokens, lengths)
    assert relative_error([logits], [stock(input_ids=tokens).logits]) < TOLERANCE
    whole = model(input_ids=tokens, output_final_state=True).final_state
    assert relative_error(parts(state), parts(whole)) < TOLERANCE


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_without_keys_attention_is_block_diagonal_and_positions_restart(model_type: str) -> None:
    stock, model = pair(model_type)
    if not model.attends:
        pytest.skip("no attention layers")
    tokens, lengths = random_tokens(2, 13), (5, 1, 7)
    state, outputs = None, []
    for piece in tokens.split(lengths, dim=1):
        output = model(input_ids=piece, initial_state=state, output_final_state=True if state is None else None)
        state = output.final_state
        outputs.append(output.logits)
    # Transformers takes positions that restart for packed sequences, whose attention it keeps apart.
    packed: dict[str, Any] = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    if model_type == "granitemoehybrid":  # does not look at positions for its mask
        piece_of = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        mask = (piece_of[:, None] == piece_of).tril()[None, None]
        packed["attention_mask"] = {"full_attention": mask, "linear_attention": None}
    expected = stock(input_ids=tokens, use_cache=False, **packed).logits
    assert relative_error([torch.cat(outputs, 1)], [expected]) < TOLERANCE


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_the_state_matters(model_type: str) -> None:
    """Else all other tests could pass with states that are ignored."""
    _, model = pair(model_type)
    state = random_state(model, 2)
    with_state = model(input_ids=random_tokens(2, 3), initial_state=state).logits
    without = model(input_ids=random_tokens(2, 3)).logits
    assert relative_error([with_state], [without]) > 30 * TOLERANCE


@torch.no_grad()
def test_models_of_recurrent_layers_only_need_no_attention_cache() -> None:
    stock, model = pair("granitemoehybrid", layer_types=["linear_attention"] * 3)
    assert not model.attends
    assert model.new_attention_cache() is None
    tokens = random_tokens(2, 20)
    first = model(input_ids=tokens[:, :9], output_final_state=True)
    second = model(input_ids=tokens[:, 9:], initial_state=first.final_state)
    expected = stock(input_ids=tokens, use_cache=False).logits
    assert relative_error([torch.cat([first.logits, second.logits], 1)], [expected]) < TOLERANCE
    with pytest.raises(ValueError, match="must be made by new_attention_cache"):
        model(input_ids=tokens, attention_cache=stateful(tiny_model("bamba")).new_attention_cache())


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["nemotron_h", "zamba2"])
def test_single_tokens_have_the_lower_limit_of_the_step_size(model_type: str) -> None:
    stock, model = pair(model_type, time_step_min=0.5)
    tokens = random_tokens(1, 6)
    logits, _ = read_in_pieces(model, tokens, (1,) * 6)
    assert relative_error([logits], [stock(input_ids=tokens).logits]) < TOLERANCE
    step = inspect.getmodule(type(stock)).mamba2_selective_state_update
    assert step.__qualname__.startswith("use_kernel") or "limited" not in step.__qualname__


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize(
    "model_type", ["falcon_h1", "jamba", "kimi_linear", "lfm2", "minimax", "qwen3_next", "xlstm", "zaya"]
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
