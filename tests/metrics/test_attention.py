"""Harm of recurrent states and of attention apart, against plain calls and against the functions for both together."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics import (
    EvaluationSettings,
    attention_apart,
    read_result,
    stream_nll,
    window_nll,
    write_result,
)
from hf_recurrent_lengthgen.metrics.attention.figure import CASES, attention_harm_figure
from hf_recurrent_lengthgen.metrics.attention.measure import attention_harm
from hf_recurrent_lengthgen.metrics.attention.result import AttentionHarm
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.plotting.images import save_png
from tests.hybrids.tiny_models import VOCABULARY, tiny_model
from tests.metrics.diagnoses import hybrid as made_up
from tests.metrics.diagnoses import states
from tests.models.families import MAMBA2, build, random_tokens
from tests.versions import needs_hybrids

pytestmark = needs_hybrids
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
            piece = tokens[:, border : border + T]
            expected = {
                "both": model(tokens[:, : border + T]).logits,
                "recurrent": model(piece, initial_state=state).logits,
                "attention": model(piece, initial_state=zero, attention_cache=copy.deepcopy(keys)).logits,
                "neither": model(piece).logits,
            }
        for name, logits in expected.items():
            np.testing.assert_allclose(getattr(found, name)[:, number], scored(logits, tokens, border), atol=1e-5)
        values = [getattr(found, name)[:, number] for name in expected]
        assert min(np.abs(one - other).max() for i, one in enumerate(values) for other in values[:i]) > 1e-4


def test_both_and_neither_are_the_two_sides_of_context_harm() -> None:
    model, tokens = hybrid("bamba"), text(40)
    found = attention_apart(model, tokens, T, progress=False)
    assert found.borders == (24, 32)  # the second half of 40 begins at 20
    whole, windows = stream_nll(model, tokens, progress=False).nll, window_nll(model, tokens, T, progress=False)
    for number, border in enumerate(found.borders):
        part = slice(border + T // 2, border + T)
        np.testing.assert_allclose(found.both[:, number], whole[:, part].mean(1), atol=1e-5)
        cut = windows.truncated[:, part.start - T : part.stop - T]
        np.testing.assert_allclose(found.neither[:, number], cut.mean(1), atol=1e-5)


def test_texts_of_two_training_lengths_have_one_border() -> None:
    assert attention_apart(hybrid("bamba"), text(2 * T), T, progress=False).borders == (T,)


def test_harm_by_length_is_that_of_plain_differences_and_the_cache_is_told() -> None:
    model, tokens = hybrid("bamba"), text(8 * T, rows=5)
    found = attention_harm(model, tokens, T, EvaluationSettings(progress=False, confidence=0.8))
    assert found.borders == (8, 11, 16, 23, 32, 45, 56)  # two per doubling, and the last that leaves T tokens
    apart = attention_apart(model, tokens, T, borders=found.borders, progress=False)
    for name in ("both", "recurrent", "attention"):
        harm = getattr(apart, name) - apart.neither
        half = scipy.stats.t.ppf(0.9, 4) * harm.std(0, ddof=1) / 5**0.5
        for estimate, mean, width in zip(getattr(found, name), harm.mean(0), half, strict=True):
            assert (estimate.mean, estimate.low) == pytest.approx((mean, mean - width), abs=1e-9)
    # 56 keys and values of 2 heads of 8 float32 numbers, in layer 1
    assert (found.layers, found.cache_bytes) == ((1,), 56 * 2 * 2 * 8 * 4)


def test_results_by_length_are_read_as_written_and_checked(tmp_path: Path) -> None:
    found = attention_harm(hybrid("bamba"), text(3 * T), T, EvaluationSettings(progress=False))
    write_result(tmp_path / "harm.json", found)
    assert read_result(tmp_path / "harm.json", AttentionHarm) == found
    with pytest.raises(ValueError, match="'recurrent' must have one value per border, at least one, got 1 for 3"):
        replace(found, recurrent=found.recurrent[:1])


@pytest.mark.parametrize("borders", [[0], [24], [], [5, 40]])
def test_borders_outside_the_texts_are_refused(borders: list[int]) -> None:
    with pytest.raises(ValueError, match=r"borders must be from 1 to 23, so that 8 of 31 tokens are left; got \["):
        attention_apart(hybrid("bamba"), text(31), T, borders=borders, progress=False)


def test_models_without_attention_and_short_texts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no attention layers beside recurrent ones.*window_nll"):
        attention_apart(build(MAMBA2), random_tokens(2, 40), T, progress=False)
    with pytest.raises(ValueError, match="too few: give at least one sequence, and 17 tokens"):
        attention_apart(hybrid("bamba"), text(2 * T - 1), T, progress=False)


def test_weights_that_give_nan_are_told() -> None:
    model = hybrid("bamba")
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(ValueError, match="The NLL is NaN or infinite within 8 tokens after a border"):
        attention_apart(model, text(31), T, progress=False)


def without_intervals(found: StateDiagnosis) -> StateDiagnosis:
    """Only the last border, of a single text."""
    assert found.attention is not None
    last = {name: (Estimate(getattr(found.attention, name)[-1].mean, None, None),) for name in CASES}
    return replace(found, attention=replace(found.attention, borders=(512,), **last))


def test_each_model_with_attention_has_a_panel_with_three_lines(tmp_path: Path) -> None:
    figure = attention_harm_figure({"one": made_up(), "none": states({}), "two": without_intervals(made_up())}, "byte")
    one, two = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["one", "two"]
    colors = list(CASES.values())
    curves = {line.get_color(): line.get_xydata() for line in one.get_lines() if line.get_color() in colors}
    np.testing.assert_allclose(curves[CASES["recurrent"]], [[16, 0.0], [64, 0.5], [512, 1.2]])
    np.testing.assert_allclose(curves[CASES["attention"]], [[16, 0.3], [64, 0.0], [512, 0.02]])
    assert (len(one.collections), len(two.collections)) == (3, 0)
    assert [line.get_marker() for line in two.get_lines() if line.get_color() == CASES["attention"]] == ["o"]
    assert (one.get_ylim(), one.get_xlim()) == (two.get_ylim(), two.get_xlim())
    assert {"states", "attention", "both"} <= {text.get_text() for text in one.texts}
    save_png(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
