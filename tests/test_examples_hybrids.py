"""The study of hybrids runs in miniature, and its ways of reading are what they are called."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.measures import pair, random_tokens, relative_error


@pytest.fixture
def study(example: Any) -> Any:
    return example("hybrids/run.py")


def test_first_keys_are_seen_beside_the_window(study: dict[str, Any]) -> None:
    stock, model = pair("bamba")
    model, tokens = stateful(model, attention_window=3), random_tokens(2, 20)
    with study["first_keys_too"]():
        found = model(tokens).logits
    places = torch.arange(20)
    ages = places[:, None] - places
    seen = (ages >= 0) & ((ages < 3) | (places < study["SINKS"]))
    masks = {"full_attention": seen.expand(2, 1, 20, 20), "linear_attention": None}
    expected = stock(tokens, attention_mask=masks).logits
    assert relative_error([found], [expected]) < 1e-5
    assert relative_error([model(tokens).logits], [expected]) > 1e-4  # the window alone, again


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "qwen3_next"])
def test_moved_keys_stand_before_the_window(study: dict[str, Any], model_type: str) -> None:
    """Each token against a call of the stock layer with the kept tokens alone, at places from 0 on."""
    stock, model = pair(model_type)
    model, window, sinks = stateful(model, attention_window=5), 5, study["SINKS"]
    name = next(name for name, module in stock.named_modules() if name.endswith("self_attn"))
    hidden = torch.randn(1, 20, stock.config.hidden_size)
    places = torch.arange(20)

    def attended(of: Any, kept: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        angles = of.model.rotary_emb(hidden, torch.arange(len(kept))[None])
        return of.get_submodule(name)(hidden[:, kept], position_embeddings=angles, attention_mask=mask)[0]

    seen = (places[:, None] >= places) & ((places[:, None] - places < window) | (places < sinks))
    with study["first_keys_moved"](model):
        found = attended(model, places, seen[None, None])
    for token in places:
        kept = places[seen[token]]
        alone = attended(stock, kept, torch.ones(len(kept), len(kept)).bool().tril()[None, None])
        torch.testing.assert_close(found[:, token], alone[:, -1], rtol=1e-4, atol=1e-5)


def test_moved_keys_end_with_their_block(study: dict[str, Any]) -> None:
    """A call within the block lets the attention of its name obey the window, for the whole process."""
    stock, model = pair("bamba")
    model, tokens = stateful(model, attention_window=5), random_tokens(1, 20)
    expected = stock(tokens).logits
    with study["first_keys_moved"](model):
        assert relative_error([model(tokens).logits], [expected]) > 1e-4
    assert relative_error([stock(tokens).logits], [expected]) == 0


def test_rotary_embeddings_are_those_of_transformers(study: dict[str, Any], tmp_path: Path) -> None:
    stock, _ = pair("bamba")
    stock.save_pretrained(tmp_path)
    tokens, logits = random_tokens(1, 64), {}
    for name in ("all", "linear", "yarn", "dynamic"):
        with study["read_in"](tmp_path, study["WAYS"][name], 16) as model:
            logits[name] = model.eval()(tokens).logits
            rotary = model.model.rotary_emb
            assert rotary.rope_type == {"all": "default"}.get(name, name)
            if name == "linear":  # positions over 64
                expected = stock.model.rotary_emb.inv_freq / study["MULTIPLE"]
                torch.testing.assert_close(rotary.inv_freq, expected)
    assert relative_error([logits["all"]], [stock(tokens).logits]) < 1e-5
    inside = relative_error([logits["dynamic"][:, :16]], [logits["all"][:, :16]])
    assert inside > 1e-6  # the whole call has other frequencies at the begin, too
