"""Harm by window of attention, against plain calls of a model with that window, and the window that is named."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics import EvaluationSettings, attention_window_harm
from hf_recurrent_lengthgen.metrics.states.figure import attention_windows_figure
from hf_recurrent_lengthgen.metrics.states.result import WindowHarm
from tests.hybrids.tiny_models import tiny_model
from tests.metrics.diagnoses import hybrid
from tests.metrics.test_attention import text
from tests.models.families import MAMBA2, build, random_tokens

T = 8
QUIET = EvaluationSettings(progress=False, batch_size=2, chunk_length=5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("model_type", "own"), [("bamba", None), ("qwen3_next", 3)])
def test_harm_is_that_of_plain_calls_with_the_window(model_type: str, own: int | None) -> None:
    model, tokens = stateful(tiny_model(model_type), attention_window=own), text(29)
    found = attention_window_harm(model, tokens, T, settings=QUIET)
    assert found.windows == (*sorted({2, 4, 8, 16, own or 2}), None)
    assert found.last_range == (14, 29)
    assert getattr(model.config, "attention_window", None) == own

    def losses(window: Any, ids: torch.Tensor) -> np.ndarray:
        windowed = stateful(tiny_model(model_type), attention_window=window or "none").eval()
        with torch.no_grad():
            return np.asarray(cross_entropy(windowed(ids[:, :-1]).logits.mT, ids[:, 1:], reduction="none"))

    whole = losses(None, tokens)
    short = np.empty((3, 29))
    for start in range(4, 29, 4):  # the second half of each window of 8 tokens, which begin at multiples of 4
        window = losses(None, tokens[:, start : start + 9])[:, 4:]
        short[:, start + 4 : start + 8] = window[:, : 29 - start - 4]
    for window, harm, inside in zip(found.windows, found.harm, found.inside, strict=True):
        read = losses(window, tokens)
        if window == 2:
            assert np.abs(read - whole).max() > 1e-3
        assert harm.mean == pytest.approx((read - short)[:, 14:].mean(), abs=1e-5)
        assert inside.mean == pytest.approx((read - whole)[:, :T].mean(), abs=1e-5)


def test_the_own_window_is_there_again_after_an_error() -> None:
    model = stateful(tiny_model("bamba"), attention_window=3)
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(ValueError, match="NLL is nan"):
        attention_window_harm(model, text(29), T, [2], QUIET)
    assert model.config.attention_window == 3


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="limits the attention of hybrids"):
        attention_window_harm(build(MAMBA2), random_tokens(2, 40), T, settings=QUIET)


@pytest.mark.parametrize(
    ("harm", "inside", "best"),
    [
        ((0.5, 0.1, 0.2, 2.0), (0.3, 0.0, 0.0, 0.0), 8),
        ((0.1, 0.105, 0.109, 2.0), (0.0, 0.0, 0.0, 0.0), 16),  # as good
        ((0.0, 0.1, 0.3, 2.0), (0.2, 0.01, 0.0, 0.0), 8),  # the smallest costs inside the training length
        ((0.4, 0.3, 0.2, 0.0), (0.3, 0.2, 0.1, 0.0), None),  # keys from far away help
        ((0.1, 0.0, 0.0, 0.005), (0.0, 0.0, 0.0, 0.0), None),  # and do no harm
    ],
)
def test_the_window_that_is_named_is_the_largest_that_is_as_good_as_any(
    harm: tuple[float, ...], inside: tuple[float, ...], best: int | None
) -> None:
    values = (tuple(Estimate(mean, None, None) for mean in means) for means in (harm, inside))
    assert WindowHarm((16, 64), (4, 8, 16, None), *values).best == best


@pytest.mark.parametrize("last", range(3, 12))
def test_the_place_of_full_attention_is_named_however_many_windows_there_are(last: int) -> None:
    windows = (*(2**power for power in range(last)), None)
    values = tuple(Estimate(0.1 * place, None, None) for place in range(last + 1))
    found: Any = hybrid()
    apart = replace(found.attention, windows=WindowHarm((256, 512), windows, values, values[:1] * (last + 1)))
    figure = attention_windows_figure({"one": found, "two": replace(found, attention=apart)})
    for axes in figure.axes:
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert labels[-1] == "full"
        assert len(labels) <= 7
