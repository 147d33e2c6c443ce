"""A window for attention: every call is the stock model's with a mask of the window made by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LEDConfig, LEDModel
from transformers.masking_utils import AttentionMaskInterface

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.state_files import ask, load_text_state, read_text, save_text_state, start_of
from tests.hybrids.measures import (
    WINDOW,
    kept,
    masked,
    random_tokens,
    read_in_chunks,
    relative_error,
    windowed,
)
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

LED_SIZES = {"layers": 1, "attention_heads": 1, "ffn_dim": 8}
HYBRIDS = sorted({*SUPPORTED_TYPES} - {"falcon_mamba", "mamba", "mamba2", "xlstm"})
QUICK = {"bamba", "falcon_h1", "jamba", "kimi_linear", "lfm3", "qwen3_next"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in HYBRIDS]


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_calls_without_states_have_the_mask(model_type: str) -> None:
    """test_law.py has those with states."""
    stock, model = windowed(model_type)
    tokens = random_tokens(2, 14)
    expected, without = masked(stock, tokens).logits, stock(tokens).logits
    mask = torch.tensor([[0] * 8 + [1] * 6, [1] * 14])
    for use_cache in (True, False):
        assert relative_error([model(tokens, use_cache=use_cache).logits], [expected]) < 1e-5
        padded = model(tokens, attention_mask=mask, use_cache=use_cache).logits
        assert (
            relative_error([padded[1], padded[0, 8:]], [expected[1], masked(stock, tokens[:1, 8:]).logits[0]]) < 1e-5
        )
    assert relative_error([without], [expected]) > 0.05


def by_masks(stock: Any, prompt: Tensor, new: int, window: int = WINDOW) -> Tensor:
    """Greedy tokens, each from a call of the stock model with a mask by hand."""
    text = prompt
    for _ in range(new):
        text = torch.cat([text, masked(stock, text, window).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


@pytest.mark.thinned(7)
@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_generate_attends_to_the_window(model_type: str) -> None:
    stock, model = windowed(model_type)
    prompt = random_tokens(2, 8)
    options: Any = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = by_masks(stock, prompt, 9)
    output = model.generate(prompt, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences[:, 8:], expected)
    found = getattr(output, "cache", None) or output.past_key_values
    assert {keys.shape[2] for keys in kept(found)} == {WINDOW - 1}
    if model_type == "minimax":
        return  # takes no attention cache and no padding, and its beams are those of the stock class, which are wrong
    beams = [model.generate(prompt, num_beams=3, use_cache=cache, **options) for cache in (True, False)]
    assert torch.equal(*beams)
    state, cache = None, model.new_attention_cache()
    for chunk in prompt[:, :-1].split(3, dim=1):
        state = model(chunk, initial_state=state, attention_cache=cache).final_state
    start = {"initial_state": state, "attention_cache": cache}
    assert torch.equal(model.generate(prompt[:, -1:], **start, **options)[:, 1:], expected)
    beams = [model.generate(prompt[:, -1:], num_beams=3, **start, **options)[:, 1:], beams[0][:, 8:]]
    assert torch.equal(*beams)
    assert {keys.shape[:1] + keys.shape[2:3] for keys in kept(cache)} == {(2, WINDOW - 1)}  # unchanged
    padded, mask = prompt.clone(), torch.ones_like(prompt)
    padded[0, :6], mask[0, :6] = 0, 0
    generated = model.generate(padded, attention_mask=mask, **options)[:, 8:]
    assert torch.equal(generated, torch.cat([by_masks(stock, prompt[:1, 6:], 9), expected[1:]]))


@torch.no_grad()
@pytest.mark.parametrize("window", [1, WINDOW])
@pytest.mark.parametrize("model_type", ["bamba", pytest.param("lfm3", marks=pytest.mark.slow)])
def test_a_cache_keeps_the_keys_of_the_window_alone(model_type: str, window: int, tmp_path: Any) -> None:
    stock, model = windowed(model_type, window)
    tokens = random_tokens(1, 10 * window + 3)
    state, cache, sizes = None, model.new_attention_cache(), set()
    for chunk in tokens.split(window + 2, dim=1):
        state = model(chunk, initial_state=state, attention_cache=cache).final_state
        sizes |= {(keys.shape[2], keys.untyped_storage().nbytes() // keys.element_size()) for keys in kept(cache)}
    assert sizes == {(window - 1, kept(cache)[0].numel())}
    assert cache.get_seq_length() == tokens.shape[1]

    save_text_state(tmp_path / "text", read_text(model, tokens[:, :-2], chunk_length=3))
    text_state = load_text_state(tmp_path / "text", model)
    assert {layer.keys.shape[2] for layer in text_state.keys.values()} == {window - 1}
    logits = model(tokens[:, -2:], **start_of(model, text_state)).logits
    assert relative_error([logits], [masked(stock, tokens, window).logits[:, -2:]]) < 1e-5
    answer = ask(model, text_state, tokens[:, -2:], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(answer[:, 2:], model.generate(tokens, max_new_tokens=3, do_sample=False)[:, tokens.shape[1] :])
    with pytest.raises(ValueError, match=r"differs .* in the config \(attention_window\)"):
        load_text_state(tmp_path / "text", stateful(tiny_model(model_type), attention_window=window + 1))
    for other in (window + 1, "none"):
        with pytest.raises(ValueError, match=r"another config \(attention_window\): give the model that read it"):
            ask(stateful(model, attention_window=other), text_state, tokens[:, -1:])


def flash_by_hand(
    query: Any, key: Any, value: Any, mask: Any, sliding_window: Any, softmax_scale: Any, **_: Any
) -> Any:
    """(B, T, H, D), aligned at the last token, as flash attention does it."""
    key, value = (x.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for x in (key, value))
    assert mask is None
    output = torch.empty_like(query)
    for t in range(query.shape[1]):
        last = key.shape[1] - query.shape[1] + t + 1
        near = slice(max(0, last - sliding_window), last)
        weights = (torch.einsum("bhd,bshd->bhs", query[:, t], key[:, near]) * softmax_scale).softmax(-1)
        output[:, t] = torch.einsum("bhs,bshd->bhd", weights, value[:, near])
    return output


@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted({"bamba", "lfm3"} & {*SUPPORTED_TYPES}))
def test_eager_and_flash_attention_have_the_window(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", flash_by_hand)
    stock, model = windowed(model_type)
    tokens = random_tokens(2, 23)
    expected = masked(stock, tokens).logits
    for name in ("eager", "flash_attention_2"):
        model.config._attn_implementation = name
        assert relative_error([model(tokens).logits], [expected]) < 1e-5
        assert relative_error([read_in_chunks(model, tokens, [7, 1, 15])[0]], [expected]) < 1e-5
    mask = AttentionMaskInterface()["eager"](batch_size=1, q_length=9, kv_length=9)  # of who names no config
    assert int((mask == 0).sum()) == 45


@torch.no_grad()
def test_the_window_is_kept_in_the_checkpoint(tmp_path: Any) -> None:
    stock, model = windowed("falcon_h1")
    model.save_pretrained(tmp_path)
    loaded, tokens = load_model(str(tmp_path)).eval(), random_tokens(2, 14)
    assert loaded.config.attention_window == WINDOW
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert stateful(loaded, attention_window=3).config.attention_window == 3
    assert relative_error([loaded(tokens).logits], [masked(stock, tokens, 3).logits]) < 1e-5
    stateful(loaded, attention_window="none")
    assert relative_error([loaded(tokens).logits], [stock(tokens).logits]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("window", [3, WINDOW])
def test_generate_shortens_the_cache_of_a_larger_window(window: int) -> None:
    reader, tokens = stateful(tiny_model("bamba")), random_tokens(2, 14)
    start = {"attention_cache": reader.new_attention_cache()}
    start["initial_state"] = reader(tokens[:, :10], **start).final_state
    model = stateful(copy.deepcopy(reader), attention_window=window)
    found = model.generate(tokens[:, 10:11], **start, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert {keys.shape[2] for keys in kept(start["attention_cache"])} == {10}  # unchanged
    text, (state, cache) = tokens[:, 10:11], (start["initial_state"], start["attention_cache"])
    for _ in range(3):
        output = model(text[:, -1:], initial_state=state, attention_cache=cache)
        state, text = output.final_state, torch.cat([text, output.logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text)


def test_models_of_other_types_keep_what_they_call_attention_window() -> None:
    layers = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in LED_SIZES.items()}
    led = LEDModel(LEDConfig(vocab_size=32, d_model=8, attention_window=4, **layers)).eval()
    text = {"input_ids": random_tokens(1, 8), "decoder_input_ids": random_tokens(1, 8)}
    expected = led(**text).last_hidden_state
    windowed("bamba")[1](random_tokens(1, 8))
    assert torch.equal(led(**text).last_hidden_state, expected)
