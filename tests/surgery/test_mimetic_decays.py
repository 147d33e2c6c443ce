"""Decays of a mimetic start, against A = -exp(-c A_log) (arXiv:2410.11135, section 3) of the model's own A_log."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.surgery import expand_state, mimetic_initialization
from tests.models.families import randomized
from tests.surgery.test_mimetic import SIZES, changed_names, mamba1_model, only, parameters, stateful_model

HEADS = {"num_heads": 64, "head_dim": 2, "hidden_size": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("c", "offset"), [(8.0, 0), (5.0, 1), (2.0, 3)])
@pytest.mark.parametrize("family", ["Mamba-2 of mamba-ssm", "Mamba-2", "Mamba-1", "Mamba-1, trained"])
def test_decays_are_those_of_the_model_to_the_power_of_minus_c(
    family: str, c: float, offset: int, dtype: torch.dtype
) -> None:
    """Section 3: A = -exp(-c A_log), also where A is not -1, -2, ..."""
    of_authors = {"initialization": "mamba-ssm"} if "ssm" in family else {}
    model = mamba1_model(state_size=4) if "Mamba-1" in family else stateful_model(**HEADS, **of_authors)
    a_log = model.to(dtype).backbone.layers[1].mixer.A_log
    if "trained" in family:
        a_log.data.uniform_(0.01, 3)
    before = a_log.double().exp().flatten().tolist()
    mimetic_initialization(model, **only("a"), c=c, offset=offset)
    expected = torch.tensor([-c * math.log(u + offset) for u in before], dtype=torch.float64)
    assert torch.equal(a_log.flatten(), expected.to(dtype))


@pytest.mark.parametrize("make", [stateful_model, lambda **heads: mamba1_model(state_size=16)])
@pytest.mark.parametrize("c", [2.0, 4.0, 8.0])
def test_from_decays_of_1_2_and_so_on_they_are_powers_of_the_number(make: Callable[..., Any], c: float) -> None:
    model = make(**HEADS)
    mimetic_initialization(model, **only("a"), c=c)
    a_log = model.backbone.layers[2].mixer.A_log
    numbers = torch.arange(1, a_log.shape[-1] + 1, dtype=torch.float64)
    expected = (-c * numbers.log()).float().expand_as(a_log)
    torch.testing.assert_close(a_log, expected, rtol=2**-23, atol=0)  # log as float32 is drawn to its last bit


def test_few_heads_of_the_authors_start_keep_decaying() -> None:
    """Of A ~ U(1, 16) to the power of -8 a share of (0.1^(-1/8) - 1) / 15 = 2.2 % is above 0.1; never 1 of H heads."""
    model: Any = stateful_model(**HEADS, initialization="mamba-ssm", num_hidden_layers=100)
    mimetic_initialization(model, **only("a"))
    rates = torch.stack([layer.mixer.A_log.exp() for layer in model.backbone.layers])
    assert (rates > 0.1).float().mean().item() == pytest.approx(0.0223, abs=0.005)
    assert rates.max() < 1


@pytest.mark.parametrize(
    ("before", "offset", "after"), [(1e4, 1, -8e4), (0.0, 0, 0.0), (-0.5, 1, -8 * math.log(1 + math.exp(-0.5)))]
)
def test_extreme_decays_stay_finite(before: float, offset: int, after: float) -> None:
    model: Any = stateful_model()
    a_log = model.backbone.layers[0].mixer.A_log
    a_log.data.fill_(before)
    mimetic_initialization(model, **only("a"), offset=offset)
    torch.testing.assert_close(a_log, torch.full((2,), after))


def test_an_expanded_layer_starts_from_the_decays_that_it_was_drawn_with() -> None:
    trained: Any = randomized(StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES, initialization="mamba-ssm")))
    model: Any = expand_state(trained, [1], factor=2, initialization="reinit")
    before = parameters(model)
    mimetic_initialization(model, layers=[1])
    name = "backbone.layers.1.mixer.A_log"
    torch.testing.assert_close(model.get_parameter(name), -8 * before[name])
    assert before[name].min() > 0
    assert {name.split(".")[2] for name in changed_names(before, model)} == {"1"}
