"""`generate(compile_config=...)`: a graph for all layers of a kind, and tokens, states and refusals of `generate`."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.models.state_value import clone_state

from .families import FAMILIES, GLA, MAMBA2, RWKV7, Family, build, random_state, random_tokens, variant_id
from .test_compiled_and_exported import compiling
from .test_generation import GREEDY, MODES, generate

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
three_families = pytest.mark.parametrize("family", [MAMBA2, GLA, RWKV7], ids=variant_id)
# Each token keeps the graph whole, or this raises.
STEP = CompileConfig(backend="aot_eager", mode="default", fullgraph=True)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def kinds_of_layers(model: Any) -> int:
    """The first layer of RWKV and of HGRN-2 has other parts than the rest."""
    return 1 + any(name in type(model).__name__ for name in ("RWKV", "HGRN2"))


def compiled(model: Any, *args: Any, **options: Any) -> Any:
    return generate(model, *args, **({"compile_config": STEP} | options))


@pytest.mark.thinned(5)
@compiling
@every_family
def test_one_graph_reads_the_tokens_after_prompts_of_all_lengths(family: Family) -> None:
    """From nothing, from a state, behind padding, drawn with a seed, and one token long; in any number of layers."""
    model, mask = build(family, torch.float64, num_hidden_layers=4), torch.ones(2, 7).long()
    state, mask[0, :3] = random_state(model, 2, scale=5.0), 0
    before = clone_state(state)
    for prompt, options in (
        (random_tokens(2, 7), {}),
        (random_tokens(2, 70), {}),
        (random_tokens(2, 1), {"initial_state": state}),
        (random_tokens(2, 7), {"initial_state": state, "attention_mask": mask}),
        (random_tokens(2, 5), {"do_sample": True, "temperature": 1.3}),
        (random_tokens(2, 5), {"initial_state": state, "prefill_chunk_size": 2}),
    ):
        assert torch.equal(compiled(model, prompt, **options), generate(model, prompt, **options))
    assert graphs() == kinds_of_layers(model)
    torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.slow
@compiling
@three_families
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_generate_gives_the_same_tokens(family: Family, mode: str) -> None:
    model, prompt = build(family, torch.float64), random_tokens(2, 5)
    state = random_state(model, 2)
    for options in ({}, {"initial_state": state}):
        expected = generate(model, prompt, **options, **MODES[mode])
        assert torch.equal(compiled(model, prompt, **options, **MODES[mode]), expected)
    assert graphs() == (kinds_of_layers(model) if mode != "one token" else 0)


@compiling
def test_what_it_returns_is_what_generate_returns() -> None:
    """Scores, hidden states and the state after all tokens, which is the caller's, as is that of a given cache."""
    model, prompt = build(MAMBA2, torch.float64), random_tokens(2, 5)
    options = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    given = RecurrentCache(random_state(model, 2))
    first, state = given.state, clone_state(given.state)
    expected = generate(model, prompt, cache=RecurrentCache(state), **options)
    found = compiled(model, prompt, cache=given, **options)
    torch.testing.assert_close(found.sequences, expected.sequences, rtol=0, atol=0)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    torch.testing.assert_close(found.cache.state, expected.cache.state)
    torch.testing.assert_close(first, state, rtol=0, atol=0)
    after, kept = found.cache.state, clone_state(found.cache.state)
    assert found.cache is given
    again = compiled(model, found.sequences, cache=given, **options)
    torch.testing.assert_close(after, kept, rtol=0, atol=0)
    assert torch.equal(again.sequences, generate(model, expected.sequences, cache=expected.cache))
    with torch.no_grad():
        model(prompt[:, :1], cache=given)  # not compiled: the generate is over
    assert graphs() == 1


@compiling
def test_under_inference_mode_with_an_adapter_and_in_training_mode() -> None:
    lora = LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False)
    model, prompt = build(MAMBA2, torch.float64), random_tokens(2, 5)
    get_peft_model(model, lora)
    expected = generate(model, prompt)
    with torch.inference_mode():
        assert torch.equal(compiled(model, prompt), expected)
        state = compiled(model, prompt, return_dict_in_generate=True).cache.state
    model.train()
    assert torch.equal(compiled(model, prompt), expected)
    after = generate(model, prompt, initial_state=state)
    assert torch.equal(compiled(model, prompt, initial_state=state), after)


@compiling
def test_models_of_one_configuration_share_the_graph_and_other_rows_have_a_second() -> None:
    settings = GenerationConfig(**GREEDY, compile_config=STEP, pad_token_id=0)
    for seed, rows in ((0, 2), (1, 2), (0, 3), (1, 4)):
        model, prompt = build(MAMBA2, torch.float64, seed=seed), random_tokens(rows, 5)
        assert torch.equal(model.generate(prompt, settings, eos_token_id=None), generate(model, prompt))
    assert settings.compile_config == STEP
    assert graphs() == 2
    generate(model, prompt[:, :2], compile_config=STEP, disable_compile=True)
    assert graphs() == 2


@compiling
def test_more_models_than_torch_makes_graphs_of_one_function() -> None:
    limit = torch._dynamo.config.recompile_limit
    for state_size in range(4, 6 + limit):
        model, prompt = build(MAMBA2, torch.float64, state_size=state_size, num_hidden_layers=1), random_tokens(1, 5)
        assert torch.equal(compiled(model, prompt), generate(model, prompt))
    assert graphs() == 2 + limit


@pytest.mark.slow
@compiling
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inductor_compiles_the_step(dtype: torch.dtype) -> None:
    model, prompt = build(MAMBA2, dtype, num_hidden_layers=1), random_tokens(2, 5)
    found = compiled(model, prompt, compile_config=CompileConfig(fullgraph=True))
    assert graphs() == 1
    if dtype == torch.float64:
        assert torch.equal(found, generate(model, prompt))


def test_what_cannot_be_compiled_is_refused() -> None:
    model, prompt, split = build(MAMBA2), random_tokens(1, 5), build(MAMBA2)
    split.hf_device_map = {"backbone": "cpu", "lm_head": "disk"}
    for refused, options, message in (
        (model, {"use_cache": False}, "not go with use_cache=False: leave one of them out"),
        (
            build(MAMBA2, attention_layers=[1]),
            {"use_cache": False},
            r"layers \[1\] of this model are softmax attention",
        ),
        (build(MAMBA2, forgetting={"window": 3}), {}, "not go with forgetting"),
        (split, {}, r"weights on several devices, \['cpu', 'disk'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(refused, prompt, **options)
    assert graphs() == 0
