"""Generation that continues from a state equals generation from the whole text, in every mode of `generate`."""

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import ByT5Tokenizer, GenerationConfig, LogitsProcessor, TextGenerationPipeline

from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.models.state_value import RecurrentState, clone_state, take_rows

from .families import (
    FAMILIES,
    MAMBA2,
    SHELL_FAMILIES,
    VOCABULARY,
    Family,
    build,
    random_state,
    random_tokens,
    variant_id,
)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
shell_families = pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
NEW = 9
# eos is off: a row that ends early would make tests pass that compare nothing
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "top-k and top-p": {"do_sample": True, "top_k": 7, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beams, all returned": {"num_beams": 4, "num_return_sequences": 4},
    "beam sampling": {"num_beams": 3, "do_sample": True, "temperature": 1.5},
    "several samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5},
    "several beam samples": {"do_sample": True, "num_beams": 4, "num_return_sequences": 2, "temperature": 1.5},
}


def model_of(family: Family) -> Any:
    """Double precision, so that rounding never decides between two tokens."""
    return build(family, torch.float64)


def generate(model: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(*args, **(GREEDY | options))


def greedy_by_hand(model: Any, tokens: Tensor, state: RecurrentState | None = None, new: int = NEW) -> Tensor:
    """The full text through the model for every token, no cache; (B, new)."""
    start = tokens.shape[1]
    for _ in range(new):
        logits = model(tokens, initial_state=state).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens[:, start:]


@pytest.mark.thinned(5)
@every_family
def test_greedy_generation_is_the_repeated_argmax(family: Family) -> None:
    model, state, prompt = model_of(family), None, random_tokens(2, 5)
    expected = greedy_by_hand(model, prompt)
    assert len(set(expected.flatten().tolist())) > 4  # a constant answer would prove little
    assert torch.equal(generate(model, prompt)[:, 5:], expected)
    assert torch.equal(generate(model, input_ids=prompt, use_cache=False)[:, 5:], expected)
    state = random_state(model, 2, scale=5.0)
    expected = greedy_by_hand(model, prompt, state)
    assert torch.equal(generate(model, prompt, initial_state=state)[:, 5:], expected)
    assert not torch.equal(expected, greedy_by_hand(model, prompt))


@pytest.mark.thinned(13)
@shell_families
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_continuing_from_a_state_equals_the_whole_prompt(family: Family, mode: str, cut: int) -> None:
    model, text = model_of(family), random_tokens(2, 7)
    # the truth keeps no state at all between tokens
    whole = generate(model, text, use_cache=False, **MODES[mode])
    state = model(text[:, :cut]).final_state
    before = clone_state(state)
    continued = generate(model, text[:, cut:], initial_state=state, **MODES[mode])
    assert torch.equal(continued[:, 7 - cut :], whole[:, 7:])
    assert torch.equal(generate(model, text, **MODES[mode]), whole)
    assert all(torch.equal(a, b) for x, y in zip(state, before, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.thinned(13)
@shell_families
@pytest.mark.parametrize("mode", ["greedy", "beams", "several samples"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_continue_as_each_row_alone(family: Family, mode: str, side: str) -> None:
    """Rows are compared with themselves unpadded; for samples, whose random numbers depend on the batch, by greedy."""
    model, state = model_of(family), random_state(model_of(family), 3)
    lengths, width = [2, 5, 3], 5
    rows = [random_tokens(1, n, seed=n) for n in lengths]
    tokens, mask = torch.zeros(3, width).long(), torch.zeros(3, width).long()
    for row, (length, ids) in enumerate(zip(lengths, rows, strict=True)):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        tokens[row, place], mask[row, place] = ids[0], 1
    options = MODES[mode] | ({"do_sample": True, "top_k": 1} if "do_sample" in MODES[mode] else {})
    for start in (None, state):
        together = generate(model, tokens, attention_mask=mask, initial_state=start, **options)[:, width:]
        together = together.reshape(3, -1, NEW)
        for row, ids in enumerate(rows):
            own = None if start is None else take_rows(start, slice(row, row + 1))
            alone = generate(model, ids, initial_state=own, **options)[:, lengths[row] :]
            assert torch.equal(together[row], alone)


@pytest.mark.thinned(5)
@shell_families
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "beams", "several samples"])
def test_embeddings_can_be_the_prompt(family: Family, mode: str, with_state: bool) -> None:
    model, prompt = model_of(family), random_tokens(2, 5)
    state = random_state(model, 2) if with_state else None
    embeds = model.get_input_embeddings()(prompt).detach()
    expected = generate(model, prompt, initial_state=state, **MODES[mode])[:, 5:]
    assert torch.equal(generate(model, inputs_embeds=embeds, initial_state=state, **MODES[mode]), expected)
    if not with_state:
        assert torch.equal(generate(model, inputs_embeds=embeds, use_cache=False, **MODES[mode]), expected)


@pytest.mark.thinned(5)
@every_family
def test_the_state_after_generation_has_read_all_but_the_last_token(family: Family) -> None:
    model, prompt, state = model_of(family), random_tokens(2, 5), random_state(model_of(family), 2)
    output = generate(model, prompt, initial_state=state, return_dict_in_generate=True)
    assert isinstance(output.past_key_values, RecurrentCache)
    expected = model(output.sequences[:, :-1], initial_state=state).final_state
    for layer, truth in zip(output.past_key_values.state, expected, strict=True):
        for part, true_part in zip(layer, truth, strict=True):
            torch.testing.assert_close(part, true_part)


@pytest.mark.thinned(5)
@every_family
def test_generation_overwrites_its_own_states_only(family: Family) -> None:
    """A token is read in place, but states that anyone else may hold keep their bits."""
    model, prompt = model_of(family), random_tokens(2, 5)
    initial, seen, kept = random_state(model, 2), [], []

    def look(_: Any, __: Any, output: Any) -> None:
        if output.past_key_values is not None:
            seen.append(output.past_key_values.state[0].recurrent.data_ptr())

    def keep(state: RecurrentState | None) -> None:
        assert state is not None
        kept.append((state, clone_state(state)))

    keep(initial)
    hook = model.register_forward_hook(look)
    first = generate(model, prompt, initial_state=initial, return_dict_in_generate=True)
    in_place = len(set(seen[:NEW])) == 1
    hook.remove()
    assert in_place == (model.config.forgetting is None)
    cache = first.past_key_values
    keep(cache.state)
    again = generate(model, first.sequences, past_key_values=cache, return_dict_in_generate=True)
    keep(again.past_key_values.state)
    with torch.no_grad():
        keep(model(random_tokens(2, 1), past_key_values=cache).final_state)
        model(random_tokens(2, 1), past_key_values=cache)
    with pytest.raises(RuntimeError, match="stop"):
        generate(model, first.sequences, past_key_values=RecurrentCache(initial), logits_processor=[_Stops()])
    for state, copy in kept:
        assert all(torch.equal(a, b) for x, y in zip(state, copy, strict=True) for a, b in zip(x, y, strict=True))


class _Stops(LogitsProcessor):
    """Fails at the fourth token."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("stop")
        return scores


@shell_families
def test_a_cache_of_ones_own_is_advanced_in_place(family: Family) -> None:
    model, tokens, cache = model_of(family), random_tokens(2, 9), RecurrentCache()
    for chunk in tokens.split([4, 1, 4], 1):
        output = model(chunk, past_key_values=cache)
        assert output.past_key_values is cache
    assert (cache.tokens_seen, len(cache), cache.is_initialized) == (9, 2, True)
    torch.testing.assert_close(output.logits, model(tokens).logits[:, 5:])
    cache.reset()
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits)


@every_family
def test_rows_of_a_cache_are_repeated_selected_and_reordered(family: Family) -> None:
    model = model_of(family)
    state = random_state(model, 2)
    cache = RecurrentCache(state)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    expected = take_rows(state, torch.tensor([0, 1, 0]))
    assert cache.state is not None
    assert all(
        torch.equal(a, b) for x, y in zip(cache.state, expected, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert "layers=2" in repr(cache)
    assert (cache.get_seq_length(), cache.get_max_cache_shape()) == (0, -1)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(1)


@shell_families
def test_peft_wrapped_models_generate_from_a_state(family: Family) -> None:
    model, text = model_of(family), random_tokens(2, 6)
    peft_model = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=sorted(family.linear_modules))
    ).double()
    peft_model.eval()
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    state = peft_model(input_ids=text[:, :4]).final_state
    expected = greedy_by_hand(peft_model, text)
    assert torch.equal(generate(peft_model, input_ids=text[:, 4:], initial_state=state)[:, 2:], expected)
    with peft_model.disable_adapter():
        assert not torch.equal(greedy_by_hand(peft_model, text), expected)


@shell_families
def test_the_text_generation_pipeline_runs(family: Family) -> None:
    tokenizer = ByT5Tokenizer()
    model = build(family, torch.float64, vocab_size=384)
    pipeline = TextGenerationPipeline(model, tokenizer)
    (result,) = pipeline("recurrent", **GREEDY, return_tensors=True, add_special_tokens=False)
    prompt = tokenizer("recurrent", add_special_tokens=False, return_tensors="pt").input_ids
    assert result["generated_token_ids"] == torch.cat([prompt, greedy_by_hand(model, prompt)], 1)[0].tolist()
    # a batch of different lengths is padded by the pipeline
    tokenizer.padding_side = "left"
    results = pipeline(["recurrent", "x"], **GREEDY, return_tensors=True, add_special_tokens=False, batch_size=2)
    prompt = tokenizer("x", add_special_tokens=False, return_tensors="pt").input_ids
    assert results[1][0]["generated_token_ids"][-NEW:] == greedy_by_hand(model, prompt)[0].tolist()


@shell_families
def test_generation_settings_and_limits_are_honored_with_a_state(family: Family) -> None:
    model, prompt = model_of(family), random_tokens(1, 3)
    state = random_state(model, 1)
    expected = greedy_by_hand(model, prompt, state)
    config = GenerationConfig(**GREEDY, pad_token_id=0)
    assert torch.equal(model.generate(prompt, config, initial_state=state)[:, 3:], expected)
    assert torch.equal(model.generate(prompt, generation_config=config, initial_state=state)[:, 3:], expected)
    stop = int(expected[0, 2])
    stopped = generate(model, prompt, initial_state=state, eos_token_id=stop)[0, 3:]
    assert stopped.tolist() == expected[0, : expected[0].tolist().index(stop) + 1].tolist()
    assert int(expected.max()) < VOCABULARY


@shell_families
def test_what_generate_cannot_do_is_refused(family: Family) -> None:
    model, prompt = model_of(family), random_tokens(2, 3)
    state = random_state(model, 2)
    for options, message in (
        ({"initial_state": state, "past_key_values": RecurrentCache(state)}, "initial_state or cache"),
        ({"past_key_values": RecurrentCache(random_state(model, 3))}, "cached state has 3 rows, the batch has 2"),
        ({"past_key_values": state}, "must be a RecurrentCache"),
    ):
        for run in (partial(generate, model), model, model.base_model):
            with pytest.raises(ValueError, match=message):
                run(prompt, **options)
    for assistant in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": model}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(model, prompt[:1], **assistant)
    read = RecurrentCache()
    model(prompt, past_key_values=read)
    with pytest.raises(ValueError, match=r"read 3 tokens and input_ids has 3: give the whole text .* or only the new"):
        generate(model, prompt, past_key_values=read)


def test_generation_stops_at_strings_and_needs_a_prompt() -> None:
    model, tokenizer = build(MAMBA2, vocab_size=384), ByT5Tokenizer()
    prompt = tokenizer("def f", add_special_tokens=False, return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    whole = model.generate(**prompt, **options)[0, 5:]
    stop = tokenizer.decode(whole[3:4])
    stopped = model.generate(**prompt, **options, stop_strings=[stop], tokenizer=tokenizer)[0, 5:]
    assert stopped.tolist() == whole[: len(stopped)].tolist()
    assert stop in tokenizer.decode(stopped)
    assert len(stopped) < 20
    with pytest.raises(ValueError, match="read 0 tokens and input_ids has 0: give"):
        model.generate(prompt.input_ids[:, :0], **options)
