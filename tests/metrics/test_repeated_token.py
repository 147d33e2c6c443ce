"""The prompt of one token against models whose loss on it is known, and tokenizers that know a newline or do not."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt, constant_prompt, newline_token
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

VOCABULARY = 7


def certain_until(reach: int, before: float = 2.0, after: float = -2.0) -> Callable[[Tensor], Tensor]:
    """Strength of a counter model for its preferred token: `before` nats on the first `reach` tokens of context."""
    return lambda count: torch.where(count <= reach, before, after)


def loss(strength: float) -> float:
    return math.log(math.exp(strength) + VOCABULARY - 1) - strength


@pytest.mark.parametrize("chunk_length", [None, 7, 64])
def test_maxima_and_the_first_bin_above_the_limit(counter_model: type, chunk_length: int | None) -> None:
    # Of zeros alone the sum of all ids stays 0, so the counter model prefers the token that is repeated.
    model = counter_model(certain_until(91))
    found = constant_prompt(model, 0, 32, 300, chunk_length=chunk_length, progress=False)
    assert found.inside == pytest.approx(loss(2), rel=1e-5)
    assert found.beyond == pytest.approx(loss(-2), rel=1e-5)
    assert (found.factor, found.training_length, found.length, found.curve.low) == (2, 32, 300, None)
    edges = found.curve.edges
    assert found.exceeded_from == 91  # an edge: 32 * 2^1.5
    assert (edges[0], edges[-1]) == (0, 300)
    assert {32, 91} <= {*edges}


def test_the_first_bin_does_not_set_the_limit(counter_model: type) -> None:
    def shy_at_first(count: Tensor) -> Tensor:
        return torch.where((count == 1) | (count > 90), -2.0, 2.0)

    found = constant_prompt(counter_model(shy_at_first), 0, 32, 300, progress=False)
    assert found.curve.mean[0] == pytest.approx(loss(-2), rel=1e-5)
    assert found.exceeded_from is not None


def test_a_model_that_holds_exceeds_nothing(counter_model: type, tmp_path: Any) -> None:
    model = counter_model(certain_until(90, after=1.5))
    found = constant_prompt(model, 0, 32, 300, progress=False)
    assert found.exceeded_from is None
    assert loss(1.5) < 2 * loss(2)
    write_result(tmp_path / "prompt.json", found)
    assert read_result(tmp_path / "prompt.json", ConstantPrompt) == found


def test_the_curve_is_that_of_one_forward_pass_over_the_token() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 8, "state_size": 4, "num_heads": 2, "head_dim": 8, "n_groups": 1}
    model: Any = StatefulMamba2ForCausalLM(StatefulMamba2Config(num_hidden_layers=2, initializer_range=0.5, **sizes))
    token = 10 + 3  # a newline in bytes
    found = constant_prompt(model, token, 16, 67, chunk_length=10, progress=False)
    with torch.no_grad():
        nll = -model.eval()(torch.full((1, 67), token)).logits[0].log_softmax(-1)[:, token].numpy()
    expected = [nll[a:b].mean() for a, b in zip(found.curve.edges, found.curve.edges[1:], strict=False)]
    np.testing.assert_allclose(found.curve.mean, expected, rtol=1e-5)
    assert np.ptp(nll) > 0


class Tokenizer:
    """Splits a text at the pieces that it knows."""

    def __init__(self, pieces: list[str], prefix: str = "") -> None:
        self.pieces, self.prefix = pieces, prefix

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids, text = [], self.prefix + text
        while text:
            piece = max((piece for piece in self.pieces if text.startswith(piece)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[index] for index in ids)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_tokenizer(), 10 + 3),
        (Tokenizer(["a", "\n", "\n\n"]), 1),
        (Tokenizer(["a", "_", "\n", "_a"], prefix="_"), 2),
    ],
    ids=["bytes", "merged newlines", "a space before each text"],
)
def test_the_newline_is_found(tokenizer: Any, expected: int) -> None:
    assert newline_token(tokenizer) == expected


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(["a", "a\n", "<", "\n"], prefix="<"),
        SimpleNamespace(
            encode=lambda text, add_special_tokens: [5] if "\n" in text else [1], decode=lambda ids: "<unk>"
        ),
        SimpleNamespace(encode=lambda text, add_special_tokens: [1] * len(text.strip()), decode=lambda ids: "?"),
    ],
    ids=["only inside words", "unknown", "dropped"],
)
def test_a_tokenizer_without_a_newline_has_none(tokenizer: Any) -> None:
    assert newline_token(tokenizer) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token": 7}, "Token ids must be from 0 to .* got 7 to 7"),
        ({"length": 32}, "length above it, .*got 32 and 32"),
        ({"training_length": 1}, "training_length must be at least 2"),
    ],
    ids=str,
)
def test_unusable_arguments_are_refused(counter_model: type, arguments: dict[str, Any], message: str) -> None:
    given = {"token": 0, "training_length": 32, "length": 64, **arguments}
    with pytest.raises(ValueError, match=message):
        constant_prompt(counter_model(certain_until(90)), **given, progress=False)
