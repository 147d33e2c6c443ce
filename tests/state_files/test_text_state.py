"""Reading in chunks, going on and asking, against the model that reads the whole text at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, NoBadWordsLogitsProcessor, WatermarkingConfig

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import map_state
from hf_recurrent_lengthgen.state_files import (
    TextState,
    ask,
    branch,
    load_text_state,
    positions_in,
    read_into,
    read_text,
    start_of,
)
from hf_recurrent_lengthgen.state_files.origin import prefix_hash
from tests.hybrids.tiny_models import VOCABULARY, tiny_model
from tests.models.families import FAMILIES, GLA, MAMBA2, Family, build, random_tokens

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
HYBRIDS = ("falcon_h1", "qwen3_next", "jamba", "lfm2")


def hybrid(name: str) -> Any:
    return stateful(tiny_model(name)).eval()


MODELS = {
    "mamba2": lambda: build(MAMBA2).eval(),
    "gla": lambda: build(GLA).eval(),
    **{name: lambda name=name: hybrid(name) for name in HYBRIDS},
}


def text(length: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_same(one: TextState, other: TextState, tolerance: float = 1e-5) -> None:
    assert (one.position, one.prefix) == (other.position, other.prefix)
    torch.testing.assert_close(one.state, other.state, rtol=tolerance, atol=tolerance)
    assert one.keys.keys() == other.keys.keys()
    for mine, theirs in zip(one.keys.values(), other.keys.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.thinned(11)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_folders_and_whole_texts_give_the_same_state_and_answers(name: str, tmp_path: Path) -> None:
    model, tokens, question = MODELS[name](), text(37), text(5, seed=4)
    whole = read_text(model, tokens)
    assert whole.prefix == prefix_hash(tokens)
    assert_same(read_text(model, tokens[:, 11:], read_text(model, tokens[:, :11]), chunk_length=4), whole)
    steps = [text_state.position for text_state in read_into(tmp_path, model, tokens, 10, chunk_length=7)]
    assert steps == positions_in(tmp_path) == [10, 20, 30, 37]
    loaded = load_text_state(tmp_path, model, tokens=tokens)
    assert_same(loaded, whole)
    expected = model.generate(torch.cat([tokens, question], dim=1), **GREEDY)[:, 37:]
    for _ in range(2):  # a text state is not changed by asking
        assert torch.equal(ask(model, loaded, question, **GREEDY), expected)
    alone = load_text_state(tmp_path, model, position=29)
    assert_same(alone, read_text(model, tokens[:, :20]))
    expected = model.generate(torch.cat([tokens[:, :20], question], dim=1), **GREEDY)[:, 20:]
    assert torch.equal(ask(model, alone, question, **GREEDY), expected)
    assert torch.equal(ask(model, branch(alone, 2), question.repeat(2, 1), **GREEDY), expected.repeat(2, 1))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_reads_on_from_a_file(family: Family, tmp_path: Path) -> None:
    model, tokens = build(family, torch.float64).eval(), random_tokens(2, 23)
    for last in read_into(tmp_path, model, tokens[:, :17], 8):
        continued = read_text(model, tokens[:, last.position :], load_text_state(tmp_path, model))
        assert_same(continued, read_text(model, tokens), 1e-9)
        logits = model(tokens[:, last.position :], **start_of(model, last)).logits
        torch.testing.assert_close(logits, model(tokens).logits[:, last.position :], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_reading_goes_on_after_the_last_file(name: str, tmp_path: Path) -> None:
    model, tokens = MODELS[name](), text(50)
    steps = read_into(tmp_path / "a", model, tokens, 10)
    assert [next(steps).position for _ in range(2)] == [10, 20]
    steps.close()  # interrupted
    assert [step.position for step in read_into(tmp_path / "a", model, tokens, 15)] == [20, 30, 45, 50]
    assert [step.position for step in read_into(tmp_path / "a", model, tokens, 15)] == [50]
    assert_same(load_text_state(tmp_path / "a", model), read_text(model, tokens))
    assert_same(load_text_state(tmp_path / "a", model, position=29), read_text(model, tokens[:, :20]))
    with pytest.raises(ValueError, match="50 tokens of another text"):
        list(read_into(tmp_path / "a", model, torch.cat([tokens[:, :49], text(9)], dim=1), 10))
    with pytest.raises(ValueError, match="and this text has only 40: give that"):
        list(read_into(tmp_path / "a", model, tokens[:, :40], 10))


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_models_in_half_precision_keep_states_in_float32(name: str, tmp_path: Path) -> None:
    model, tokens = MODELS[name]().to(torch.bfloat16), text(20)
    *_, last = read_into(tmp_path, model, tokens, 8)
    loaded = load_text_state(tmp_path, model)
    assert_same(loaded, last, 0.0)
    assert {part.dtype for layer in loaded.state for part in layer} == {torch.float32}
    assert {part.dtype for layer in loaded.keys.values() for part in layer} <= {torch.bfloat16}
    assert torch.equal(ask(model, loaded, text(4, seed=4), **GREEDY), ask(model, last, text(4, seed=4), **GREEDY))


def test_a_sliding_window_is_kept_whole(tmp_path: Path) -> None:
    model, tokens = hybrid("lfm3"), text(23)
    for last in read_into(tmp_path, model, tokens, 3):
        assert_same(load_text_state(tmp_path, model), read_text(model, tokens[:, : last.position]))
    earlier = load_text_state(tmp_path, model, position=20)
    assert {index: layer.keys.shape[2] for index, layer in earlier.keys.items()} == {1: 18, 2: 7}
    assert_same(read_text(model, tokens[:, 18:], earlier), read_text(model, tokens))
    found = model(tokens[:, 18:], **start_of(model, earlier)).logits
    torch.testing.assert_close(found, model(tokens).logits[:, 18:], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_read_is_refused() -> None:
    model = build(MAMBA2).eval()
    text_state = read_text(model, random_tokens(2, 9))
    with pytest.raises(ValueError, match="2 rows, the tokens 1"):
        read_text(model, random_tokens(1, 3), text_state)
    with pytest.raises(ValueError, match="at least one, got shape"):
        read_text(model, torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="one row of a text state"):
        branch(text_state, 2)
    broken = replace(text_state, state=map_state(lambda part: part * float("nan"), text_state.state))
    with pytest.raises(ValueError, match="NaN"):
        read_text(model, random_tokens(2, 3), broken)


def test_models_without_states_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not carry a recurrent state.*stateful\(model\)"):
        read_text(tiny_model("falcon_h1"), text(3))


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_read_from_the_active_learned_state(name: str) -> None:
    model, tokens = MODELS[name](), text(3)
    zero = read_text(model, tokens)
    with torch.no_grad():
        model.add_learned_state("one", model(text(5, seed=4), output_final_state=True).final_state)
        expected = model(tokens, output_final_state=True).final_state
    learned = read_text(model, tokens, chunk_length=1)
    torch.testing.assert_close(learned.state, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"differs from this model, which has the same name, in the config \(learned_states\)"
    ):
        read_text(model, tokens, zero)
    with model.learned_states.disable_adapter():
        torch.testing.assert_close(read_text(model, tokens).state, zero.state, rtol=0, atol=0)


def test_an_adapter_is_part_of_the_model() -> None:
    lora = LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False)
    model: Any = get_peft_model(build(MAMBA2), lora).eval()
    model.add_adapter("other", lora)
    tokens = random_tokens(1, 12)
    expected = model.generate(input_ids=tokens, **GREEDY)[:, 9:]
    read = read_text(model, tokens[:, :9])
    assert torch.equal(ask(model, read, tokens[:, 9:], **GREEDY), expected)
    model.set_adapter("other")
    with pytest.raises(ValueError, match="in the weights"):
        read_text(model, tokens, read)
    model.set_adapter("default")
    with model.disable_adapter(), pytest.raises(ValueError, match="in the weights"):
        read_text(model, tokens, read)
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling["default"] *= 2
    with pytest.raises(ValueError, match="in the weights"):
        read_text(model, tokens, read)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 2},
        {"max_length": 9},
        {"min_length": 9},
        {"token_healing": True},
    ],
    ids=str,
)
def test_what_needs_the_text_that_was_read_is_refused(settings: dict[str, float]) -> None:
    model = MODELS["mamba2"]()
    read, greedy, (name,) = read_text(model, text(9)), dict(GREEDY), settings
    if name == "max_length":
        del greedy["max_new_tokens"]  # which comes before it
    for arguments in (greedy | settings, {"generation_config": GenerationConfig(**greedy, **settings)}):
        with pytest.raises(ValueError, match=f"^{name}"):
            ask(model, read, text(4), **arguments)
    vars(model.generation_config).update(settings)
    for arguments in (greedy, {"generation_config": GenerationConfig(**greedy)}):  # which says nothing of it
        with pytest.raises(ValueError, match=rf"^{name}.*generation_config\.json"):
            ask(model, read, text(4), **arguments)
    neutral = {"max_length": {"max_new_tokens": 6}, "min_length": {"min_new_tokens": 6}}
    neutral |= {"repetition_penalty": {name: 1.0}, "no_repeat_ngram_size": {name: 0}, "token_healing": {name: False}}
    assert ask(model, read, text(4), **greedy | neutral[name]).shape == (1, 10)


END = {
    "forced_bos_token_id": lambda end, next_one: 5,
    **{f"bad_words_ids of {n}": lambda end, next_one, n=n: [[*end[len(end) - n + 1 :], next_one]] for n in (2, 3, 5)},
    "sequence_bias": lambda end, next_one: {(*end[-2:], next_one): -50.0},
    "sequence_bias as a list": lambda end, next_one: [[[*end[-2:], next_one], -50.0]],
    "watermarking_config": lambda end, next_one: WatermarkingConfig(context_width=3, bias=9.0),
    "stop_strings": lambda end, next_one: byte_tokenizer().decode([*end[-2:], next_one]),
    "logits_processor": lambda end, next_one: LogitsProcessorList(
        [NoBadWordsLogitsProcessor([[*end[-2:], next_one]])]
    ),
    "num_return_sequences": lambda end, next_one: 2,
    "guidance_scale": lambda end, next_one: 0.0,
    "begin_suppress_tokens": lambda end, next_one: [next_one],
    "forced_eos_token_id": lambda end, next_one: 4,
}
"""Values of settings that look at the end of a text, the first token after which is known."""


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
@pytest.mark.parametrize("setting", END)
def test_settings_look_at_the_prompt_as_in_the_whole_text(name: str, setting: str) -> None:
    model, tokens, question = MODELS[name](), text(12), text(5, seed=4)
    greedy = {**GREEDY, "num_beams": 2} if setting == "num_return_sequences" else dict(GREEDY)
    whole = torch.cat([tokens, question], 1)
    plain = model.generate(whole, **greedy)[:, 12:]
    settings = {setting.split()[0]: END[setting](question[0].tolist(), int(plain[0, 5]))}
    settings |= {"tokenizer": byte_tokenizer()} if setting == "stop_strings" else {}
    expected = model.generate(whole, **greedy, **settings)[:, 12:]
    assert torch.equal(expected, plain) == (setting == "forced_bos_token_id")  # which follows a text of one token only
    assert torch.equal(ask(model, read_text(model, tokens), question, **greedy, **settings), expected)


@pytest.mark.parametrize("setting", list(END)[:8])
def test_settings_that_look_beyond_the_prompt_are_refused(setting: str) -> None:
    model, tokens = MODELS["mamba2"](), text(12)
    argument = setting.split()[0]
    settings, read = {argument: END[setting](tokens[0].tolist(), 7)}, read_text(model, tokens)
    if setting == "bad_words_ids of 2":
        assert ask(model, read, text(1), **GREEDY, **settings).shape == (1, 7)
        return
    for arguments in (settings, {"generation_config": GenerationConfig(**settings)}):
        with pytest.raises(
            ValueError, match=f"^{argument}=.* needs the last . tokens .* gets 1 .*a prompt of . tokens"
        ):
            ask(model, read, text(1), **GREEDY, **arguments)
