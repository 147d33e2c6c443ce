"""Harm of recurrent states and of attention apart, against plain calls and against the functions for both together."""

import copy
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics import EvaluationSettings, attention_apart
from hf_recurrent_lengthgen.metrics.states.attention import attention_harm
from tests.hybrids.tiny_models import VOCABULARY, tiny_model
from tests.models.families import MAMBA2, build, random_tokens

T, BORDERS = 8, (3, 8, 23)


def hybrid(model_type: str) -> Any:
    return stateful(tiny_model(model_type))


def text(length: int, rows: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(3))


def scored(logits: Tensor, tokens: Tensor, border: int) -> np.ndarray:
    """Mean NLL of the last T // 2 of the T tokens after a border; logits (S, T, V) of these T."""
    targets = tokens[:, border + T // 2 + 1 : border + T + 1]
    return np.asarray(cross_entropy(logits[:, -(T // 2) :].mT, targets, reduction="none").mean(1))


@pytest.mark.parametrize("model_type", ["bamba", "qwen3_next", "falcon_h1", "jamba"])
def test_each_of_four_contexts_is_that_of_plain_calls(model_type: str) -> None:
    model, tokens = hybrid(model_type), text(31)
    found = attention_apart(model, tokens, T, borders=reversed(BORDERS), batch_size=2, progress=False)
    assert found.borders == BORDERS
    assert found.both.shape == (3, 3)
    zero = model.zero_state(3)
    for number, border in enumerate(BORDERS):
        with torch.no_grad():
            keys = model.new_attention_cache()
            state = model(tokens[:, :border], output_final_state=True, attention_cache=keys).final_state
            chunk = tokens[:, border : border + T]
            expected = {
                "both": model(tokens[:, : border + T]).logits,
                "recurrent": model(chunk, initial_state=state).logits,
                "attention": model(chunk, initial_state=zero, attention_cache=copy.deepcopy(keys)).logits,
                "neither": model(chunk).logits,
            }
        for name, logits in expected.items():
            np.testing.assert_allclose(getattr(found, name)[:, number], scored(logits, tokens, border), atol=1e-5)
        values = [getattr(found, name)[:, number] for name in expected]
        assert min(np.abs(one - other).max() for i, one in enumerate(values) for other in values[:i]) > 1e-4


def test_harm_by_length_is_that_of_plain_differences() -> None:
    model, tokens = hybrid("bamba"), text(8 * T, rows=5)
    assert attention_apart(model, text(40), T, progress=False).borders == (24, 32)  # the second half begins at 20
    found = attention_harm(model, tokens, T, EvaluationSettings(progress=False, confidence=0.8))
    assert found.borders == (8, 11, 16, 23, 32, 45, 56)  # two per doubling, and the last that leaves T tokens
    apart = attention_apart(model, tokens, T, borders=found.borders, progress=False)
    for name in ("both", "recurrent", "attention"):
        harm = getattr(apart, name) - apart.neither
        half = scipy.stats.t.ppf(0.9, 4) * harm.std(0, ddof=1) / 5**0.5
        for estimate, mean, width in zip(getattr(found, name), harm.mean(0), half, strict=True):
            assert (estimate.mean, estimate.low) == pytest.approx((mean, mean - width), abs=1e-9)


@pytest.mark.parametrize("borders", [[0], [24], [], [5, 40]])
def test_borders_outside_the_texts_are_refused(borders: list[int]) -> None:
    with pytest.raises(ValueError, match=r"borders must be from 1 to 23, so that 8 of 31 tokens are left; got \["):
        attention_apart(hybrid("bamba"), text(31), T, borders=borders, progress=False)


def test_models_without_attention_and_short_texts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no attention layers beside recurrent ones.*window_nll"):
        attention_apart(build(MAMBA2), random_tokens(2, 40), T, progress=False)
    with pytest.raises(ValueError, match="too few: give at least one sequence, and 17 tokens"):
        attention_apart(hybrid("bamba"), text(2 * T - 1), T, progress=False)


def test_weights_that_give_nan_are_reported() -> None:
    model = hybrid("bamba")
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(ValueError, match="The NLL is NaN or infinite within 8 tokens after a border"):
        attention_apart(model, text(31), T, progress=False)
