"""Going on with a text: generation, evaluation in chunks, and files, against the stock model on the whole text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.state_files import load_text_state, read_text, save_text_state, start_of
from tests.hybrids.measures import pair, random_tokens, relative_error
from tests.hybrids.tiny_models import VOCABULARY

QUICK = {"jamba", "kimi_linear", "lfm3", "mamba", "minimax", "zamba2"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]
READ, NEW = 19, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


def text() -> Tensor:
    return random_tokens(2, READ + 4, seed=3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_generation_from_a_file_is_generation_from_the_text(model_type: str, tmp_path: Path) -> None:
    stock, model = pair(model_type)
    tokens = text()
    length = READ
    save_text_state(tmp_path / "read.safetensors", read_text(model, tokens[:, :length], chunk_length=12))
    text_state = load_text_state(tmp_path / "read.safetensors", model, tokens=tokens)
    everything = start_of(model, text_state)
    expected = stock.generate(tokens, **GREEDY)
    masks = [None, torch.ones_like(tokens[:, length:])]
    if "attention_cache" in everything:  # a mask may be that of the whole text
        masks.append(torch.ones_like(tokens))
    for mask in masks:  # what was read may be asked again
        everything["attention_mask"] = mask
        assert torch.equal(model.generate(tokens[:, length:], **everything, **GREEDY), expected[:, length:])
    if "attention_cache" in everything:
        output = model(tokens[:, length:], **everything)
        assert relative_error([output.logits], [stock(tokens).logits[:, length:]]) < 1e-4
        everything = start_of(model, text_state)
    if model_type != "xlstm":  # whose stock cache cannot be reordered
        beams = {"num_beams": 3, "num_return_sequences": 2} | GREEDY
        expected = stock.generate(tokens, **beams)
        assert torch.equal(model.generate(tokens[:, length:], **everything, **beams), expected[:, length:])


@pytest.mark.parametrize("positional", [False, True])
def test_a_generation_config_is_honored_with_a_state(positional: bool) -> None:
    _, model = pair("lfm2")
    config, start = GenerationConfig(**GREEDY), {"initial_state": model.zero_state(2)}
    given = ((config,), {}) if positional else ((), {"generation_config": config})
    found = model.generate(text(), *given[0], **given[1], **start)
    assert torch.equal(found, model.generate(text(), **GREEDY, **start))
    with pytest.raises(ValueError, match="leave use_cache on"):
        model.generate(text(), GenerationConfig(use_cache=False), **start)


def test_generation_refuses_what_it_cannot_continue() -> None:
    _, model = pair("lfm2")
    tokens, state = text(), model.zero_state(2)
    refused = {
        "leave use_cache on": {"inputs": tokens, "use_cache": False},
        "needs a prompt": {},
        "makes the cache itself: leave cache_implementation='static' out": {
            "inputs": tokens,
            "cache_implementation": "static",
        },
        "not both": {"inputs": tokens, "past_key_values": model.new_attention_cache()},
        "batch of 1 rows": {"inputs": tokens[:1]},
    }
    for complaint, arguments in refused.items():
        with pytest.raises(ValueError, match=complaint):
            model.generate(initial_state=state, **arguments)


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted(QUICK))
def test_likelihood_in_chunks_is_that_of_one_pass(model_type: str) -> None:
    stock, model = pair(model_type)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (3, 40))
    ids = torch.from_numpy(tokens)
    expected = -stock(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].numpy()
    for chunk_length in (1, 17):
        result = stream_nll(model, tokens, chunk_length=chunk_length, batch_size=2, progress=False)
        np.testing.assert_allclose(result.nll, expected, atol=1e-4)
    assert result.final_state[0].recurrent.shape[0] == 3
