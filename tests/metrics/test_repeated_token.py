"""The prompt of one token against models whose loss on it is known, and tokenizers that have a newline or do not."""

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
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.repeated_token import (
    CONSTANT_PROMPT,
    ConstantPrompt,
    constant_prompt,
    constant_prompt_text,
    single_token,
)
from tests.hybrids.tiny_models import tiny_model
from tests.llamas import tiny_llama
from tests.metrics.test_states import one_head_keeps_all
from tests.metrics.test_states_trajectory import states_by_token, units_of
from tests.models.families import GLA, MAMBA, MAMBA2, RWKV6, RWKV7, Family, build, variant_id

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


def test_the_first_bin_does_not_set_the_limit_and_a_model_that_holds_exceeds_nothing(counter_model: type) -> None:
    holds = constant_prompt(counter_model(certain_until(90, after=1.5)), 0, 32, 300, progress=False)
    assert holds.exceeded_from is None
    assert loss(1.5) < 2 * loss(2)

    def shy_at_first(count: Tensor) -> Tensor:
        return torch.where((count == 1) | (count > 90), -2.0, 2.0)

    found = constant_prompt(counter_model(shy_at_first), 0, 32, 300, progress=False)
    assert found.curve.mean[0] == pytest.approx(loss(-2), rel=1e-5)
    assert found.exceeded_from is not None


def test_the_curve_is_that_of_one_forward_pass_over_the_token() -> None:
    model = build(MAMBA2, vocab_size=384)
    token = 10 + 3  # a newline in bytes
    found = constant_prompt(model, token, 16, 67, chunk_length=10, progress=False)
    with torch.no_grad():
        nll = -model.eval()(torch.full((1, 67), token)).logits[0].log_softmax(-1)[:, token].numpy()
    expected = [nll[a:b].mean() for a, b in zip(found.curve.edges, found.curve.edges[1:], strict=False)]
    np.testing.assert_allclose(found.curve.mean, expected, rtol=1e-5)
    assert np.ptp(nll) > 0


def assert_states_of(found: Any, states: dict[int, Any]) -> None:
    """Mean, standard deviation and largest element of each head are those of the states after so many tokens."""
    for place, position in enumerate(found.states.positions):
        for head in found.states.heads:
            elements = units_of(states[position][head.layer].recurrent.numpy())[0, head.head]
            expected = [elements.mean(), elements.std(), np.abs(elements).max()]
            np.testing.assert_allclose(
                [head.mean[place], head.std[place], head.largest[place]], expected, rtol=6e-4
            )  # four digits are kept


@pytest.mark.parametrize("family", [MAMBA2, GLA, RWKV6, RWKV7, MAMBA], ids=variant_id)
def test_states_are_those_of_a_loop_over_the_token(family: Family) -> None:
    model = build(family, torch.float64)
    found: Any = constant_prompt(model, 3, 8, 40, chunk_length=7, progress=False)
    states = dict(enumerate(states_by_token(family, model, torch.full((1, 41), 3)), start=1))
    assert_states_of(found, states)
    assert len(found.states.heads) == sum(units_of(layer.recurrent.numpy()).shape[1] for layer in states[1])
    for part in found.states.conv if family is MAMBA2 else ():  # 4 heads of 8, 2 groups of 5
        rows = {"x": slice(0, 32), "B": slice(32, 42), "C": slice(42, 52)}[part.part]
        conv = [states[position][part.layer].conv[0, rows].numpy() for position in found.states.positions]
        np.testing.assert_allclose(part.mean, [one.mean() for one in conv], rtol=6e-4)
        np.testing.assert_allclose(part.std, [one.std() for one in conv], rtol=6e-4)
    assert {part.layer for part in found.states.conv} == {n for n, layer in enumerate(states[1]) if layer.conv.numel()}


def test_layers_of_a_hybrid_without_a_recurrent_part_are_left_out() -> None:
    model = stateful(tiny_model("bamba")).double()
    found: Any = constant_prompt(model, 3, 8, 40, progress=False)
    assert {head.layer for head in found.states.heads} == {0, 2}
    with torch.no_grad():
        states = {n: model(torch.full((1, n), 3), output_final_state=True).final_state for n in found.states.positions}
    assert_states_of(found, states)


def test_a_head_that_keeps_all_grows_with_the_number_of_tokens(tmp_path: Any) -> None:
    found: Any = constant_prompt(one_head_keeps_all(), 3, 16, 512, progress=False)
    assert [head.name for head in found.states.drifting] == ["layer 1, head 2"]
    (head,) = found.states.drifting
    before = found.states.positions.index(128)  # the convolutions are full
    for growing in (head.std, head.mean, head.largest):
        assert growing[-1] / growing[before] == pytest.approx(512 / 128, rel=0.05)
    assert head.inputs["step"][-1] == pytest.approx(head.inputs["step"][before], rel=0.01)
    assert found.states.left_out == ()
    assert "1 of 8 heads drift on this prompt, layer 1, head 2 the furthest" in constant_prompt_text(found)
    assert list(CONSTANT_PROMPT.pictures)[1:] == [f"constant_prompt_{name}" for name in ("std", "mean", "inputs")]
    for picture in list(CONSTANT_PROMPT.pictures.values())[1:]:
        assert picture.shows(found)
        assert any(
            "trained on 16" in one.get_text() for one in picture.draw({"a": found}, ["base"], "byte").axes[0].texts
        )
    write_result(tmp_path / "prompt.json", found)
    assert read_result(tmp_path / "prompt.json", ConstantPrompt) == found


def test_a_model_without_states_has_its_loss_only() -> None:
    found = constant_prompt(tiny_llama(), 3, 8, 32, progress=False)
    assert found.states is None
    assert [picture.shows(found) for picture in CONSTANT_PROMPT.pictures.values()] == [True, False, False, False]


class Tokenizer:
    """Splits a text at the words of its vocabulary."""

    def __init__(self, vocabulary: list[str], prefix: str = "") -> None:
        self.vocabulary, self.prefix = vocabulary, prefix

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids, text = [], self.prefix + text
        while text:
            word = max((word for word in self.vocabulary if text.startswith(word)), key=len)
            ids.append(self.vocabulary.index(word))
            text = text[len(word) :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocabulary[index] for index in ids)


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
    assert single_token(tokenizer) == expected
    assert single_token(tokenizer, "a") is not None
    assert single_token(tokenizer, "\na") is single_token(tokenizer, "") is None


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
    assert single_token(tokenizer) is None


def test_a_token_outside_the_vocabulary_is_refused(counter_model: type) -> None:
    with pytest.raises(ValueError, match=r"Token ids must be from 0 to .* got 7 to 7"):
        constant_prompt(counter_model(certain_until(90)), 7, 32, 64, progress=False)
