"""Mamba-3 made to forget is its scan with other decays, keys and step sizes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.evaluation.recorded_scans import recorded_scans
from hf_recurrent_lengthgen.models.scan_trapezoid import scan_trapezoid_reference

from .families import MAMBA3, build, random_tokens


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def inputs_of_scan(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    found: list[tuple[Tensor, ...]] = []
    with recorded_scans(model, {"scan_trapezoid": lambda layer, *inputs: found.append(inputs[:-1])}):
        model(tokens)
    return found[0]


def test_mamba_3_has_no_window() -> None:
    with pytest.raises(ValueError, match="has no window, since a token writes a second time with the step size"):
        MAMBA3.config(forgetting={"window": 3})


@torch.no_grad()
def test_mamba_3_forgets_as_its_weights_could_make_it() -> None:
    """The scan of other decays, keys and step sizes."""
    model, tokens = build(MAMBA3, torch.float64, num_hidden_layers=1), random_tokens(2, 30)
    plain = model(tokens)
    dt, g, share, w, x, B, C, D = inputs_of_scan(model, tokens)
    zero = model.zero_state(2)[0].recurrent
    for settings, changed in (
        ({"retention": 0.9}, (dt, g + math.log(0.9), share, w, x, B, C, D)),
        ({"insertion": 0.75}, (dt, g, share, w, x, 0.75 * B, C, D)),
        ({"delta_scale": 0.5}, (dt / 2, g / 2, share, w, x, B, C, D)),
    ):
        with forgetting(model, **settings):
            found = model(tokens).final_state[0]
        expected = scan_trapezoid_reference(*changed, zero)[1]
        assert error(found.recurrent, expected) < 1e-12
        assert error(found.recurrent, plain.final_state[0].recurrent) > 1e-2
        assert torch.equal(found.conv, plain.final_state[0].conv)
