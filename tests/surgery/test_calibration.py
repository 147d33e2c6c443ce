"""Scales that are found on texts."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen import Forgetting, forgetting
from hf_recurrent_lengthgen.surgery import calibrate
from hf_recurrent_lengthgen.surgery import calibration as module
from tests.models.families import MAMBA2, build, random_tokens
from tests.models.family_fla import GLA
from tests.models.family_mamba import MAMBA

BEST = [0.4, 2.5]


def bowl(model: Any, read: np.ndarray, progress: bool) -> Any:
    """A loss by hand, the lowest where the scales of the layers are BEST."""
    found = Forgetting.of(model.config)
    scale = found.decay_scale if found.delta_scale == 1.0 else found.delta_scale
    scales = scale if isinstance(scale, tuple) else (scale, scale)
    loss = 3 + sum(math.log(one / best) ** 2 for one, best in zip(scales, BEST, strict=True))
    return type("Stream", (), {"nll": np.full(read[:, 1:].shape, loss)})


@pytest.mark.parametrize("setting", ["decay_scale", "delta_scale"])
def test_the_scales_go_where_the_loss_is_lowest_above_and_below_one(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "stream_nll", bowl)
    found = calibrate(build(MAMBA2), random_tokens(80, 5), setting, progress=False)
    assert found.scales == pytest.approx(BEST, rel=0.05)
    assert found.before == pytest.approx(3 + math.log(0.4) ** 2 + math.log(2.5) ** 2)
    assert found.after == pytest.approx(3, abs=0.01)


def test_an_estimate_is_the_slope_along_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of Adam is the learning rate against the sign of (L(s + cd) - L(s - cd)) / (2 c) d."""
    monkeypatch.setattr(module, "stream_nll", bowl)
    signs = np.random.default_rng(5).choice([-1.0, 1.0], 2)
    slope = sum(-2 * math.log(best) * sign for best, sign in zip(BEST, signs, strict=True))
    found = calibrate(build(MAMBA2), random_tokens(1, 5), learning_rate=0.2, seed=5, progress=False)
    expected = [math.exp(-0.2 * math.copysign(1, slope) * sign) for sign in signs]
    if sum(math.log(one / best) ** 2 for one, best in zip(expected, BEST, strict=True)) >= found.before - 3:
        expected = [1.0, 1.0]
    assert found.scales == pytest.approx(expected)


def test_a_seed_gives_its_scales_and_the_model_is_left_as_it_was() -> None:
    model, tokens = build(GLA, forgetting={"retention": 0.5}), random_tokens(6, 60)
    config, weights = model.config, {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrate(model, tokens, seed=3, learning_rate=0.5, progress=False)
    assert found == calibrate(model, tokens, seed=3, learning_rate=0.5, progress=False)
    assert found != calibrate(model, tokens, seed=4, learning_rate=0.5, progress=False)
    assert model.config is config
    assert config.forgetting == {"retention": 0.5}
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    logits = []
    with torch.no_grad(), forgetting(model, decay_scale=found.scales):
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:])
    assert found.after == pytest.approx(float(loss), rel=1e-5)
    assert found.after < found.before


def test_scales_that_do_not_help_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "stream_nll", bowl)
    monkeypatch.setattr("tests.surgery.test_calibration.BEST", [1.0, 1.0])
    found = calibrate(build(MAMBA2), random_tokens(3, 5), progress=False)
    assert found == ([1.0, 1.0], 3.0, 3.0)


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        (MAMBA2, "window", r"window must be None or a number of tokens, got "),
        (GLA, "delta_scale", "takes no delta_scale; it is for Mamba-1, Mamba-2 and Mamba-3"),
    ],
)
def test_what_cannot_be_found_is_refused(family: Any, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(build(family), random_tokens(3, 5), setting, progress=False)


def test_a_long_text_is_read_in_chunks_with_the_state_carried() -> None:
    """Mamba-1 reads 5,000 tokens in three calls; the loss is that of the whole."""
    model, tokens = build(MAMBA), random_tokens(1, 5001)
    found = calibrate(model, tokens, progress=False)
    with torch.no_grad(), forgetting(model):
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:])
    assert found.before == pytest.approx(float(loss), rel=1e-5)
