import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.surgery import mimetic_initialization

SWITCHES = ("a", "delta", "bc", "conv")
# inner size 8 in 2 heads of 4; B and C have 2 groups of 3 rows each: z 0-7, x 8-15, B 16-21, C 22-27, dt 28-29
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 4,
    "num_heads": 2,
    "head_dim": 4,
    "state_size": 3,
    "n_groups": 2,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "use_bias": True,
}
CHANGED = {
    "a": {"mixer.A_log"},
    "delta": {"mixer.dt_bias"},
    "bc": {"mixer.in_proj.weight"},
    "conv": {"mixer.conv1d.weight", "mixer.conv1d.bias"},
}


def randomized(model: nn.Module) -> nn.Module:
    """Every parameter random, so that none has the new value by chance."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def stateful_model(**changes: Any) -> nn.Module:
    return randomized(StatefulMamba2ForCausalLM(StatefulMamba2Config(**{**SIZES, **changes})))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed_names(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}


def only(switch: str) -> dict[str, bool]:
    return {name: name == switch for name in SWITCHES}


def test_a_is_a_power_of_the_heads_number() -> None:
    model: Any = stateful_model(num_heads=4, head_dim=2)
    mimetic_initialization(model, **only("a"), c=2.0)
    a_log = model.backbone.layers[1].mixer.A_log
    torch.testing.assert_close(-a_log.exp(), torch.tensor([-1.0, -1 / 4, -1 / 9, -1 / 16]))
    mimetic_initialization(model, **only("a"), c=2.0, offset=1)
    torch.testing.assert_close(-a_log.exp(), torch.tensor([-1 / 4, -1 / 9, -1 / 16, -1 / 25]))
    mimetic_initialization(model, **only("a"))
    torch.testing.assert_close(a_log, torch.tensor([0.0, -5.5451774, -8.7888983, -11.0903549]))


def test_a_step_is_one() -> None:
    model: Any = stateful_model()
    mimetic_initialization(model, **only("delta"))
    dt_bias = model.backbone.layers[2].mixer.dt_bias
    torch.testing.assert_close(dt_bias, torch.tensor([0.5413249, 0.5413249]))
    torch.testing.assert_close(torch.log1p(dt_bias.exp()), torch.ones(2))


def test_c_rows_become_the_mean_of_b_and_c_rows_of_the_same_group() -> None:
    model: Any = stateful_model()
    projection = model.backbone.layers[0].mixer.in_proj
    with torch.no_grad():
        projection.weight.copy_(torch.arange(30.0)[:, None].expand(30, 4))
    bias = projection.bias.detach().clone()
    mimetic_initialization(model, **only("bc"))
    expected = [*range(22), 19.0, 20.0, 21.0, 22.0, 23.0, 24.0, 28, 29]
    torch.testing.assert_close(projection.weight[:, 0].tolist(), [float(value) for value in expected])
    assert torch.equal(projection.weight, projection.weight[:, :1].expand(30, 4))
    assert torch.equal(projection.bias, bias)


@pytest.mark.parametrize("use_conv_bias", [True, False])
def test_the_convolution_returns_its_input(use_conv_bias: bool) -> None:
    model: Any = stateful_model(use_conv_bias=use_conv_bias)
    mimetic_initialization(model, **only("conv"))
    mixer = model.backbone.layers[0].mixer
    x = torch.randn(2, 20, 7)
    convolved = torch.nn.functional.conv1d(x, mixer.conv1d.weight, mixer.conv1d.bias, padding=3, groups=20)
    assert torch.equal(convolved[..., :7], x)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_its_own_parameters_of_the_chosen_layers_only(switch: str) -> None:
    model = stateful_model()
    before = parameters(model)
    mimetic_initialization(model, **only(switch), layers=[2, 0])
    expected = {f"backbone.layers.{layer}.{name}" for layer in (0, 2) for name in CHANGED[switch]}
    assert changed_names(before, model) == expected


def test_all_switches_are_on_by_default_and_in_all_layers() -> None:
    model = stateful_model()
    before = parameters(model)
    mimetic_initialization(model)
    names = set().union(*CHANGED.values())
    assert changed_names(before, model) == {f"backbone.layers.{layer}.{name}" for layer in range(3) for name in names}


def test_no_switch_changes_nothing() -> None:
    model = stateful_model()
    before = parameters(model)
    mimetic_initialization(model, a=False, delta=False, bc=False, conv=False)
    assert changed_names(before, model) == set()


def test_a_layer_named_twice_is_changed_once() -> None:
    twice, once = stateful_model(), stateful_model()
    mimetic_initialization(twice, layers=[1, 1])
    mimetic_initialization(once, layers=[1])
    assert changed_names(parameters(once), twice) == set()


def test_the_config_does_not_change() -> None:
    model: Any = stateful_model()
    before = copy.deepcopy(model.config.to_dict())
    mimetic_initialization(model)
    assert model.config.to_dict() == before


def test_the_mixers_of_transformers_get_the_same_weights() -> None:
    ours = stateful_model()
    theirs = Mamba2ForCausalLM(Mamba2Config(**SIZES))
    theirs.load_state_dict(ours.state_dict())
    mimetic_initialization(ours, c=3.0, offset=1)
    mimetic_initialization(theirs, c=3.0, offset=1)
    assert changed_names(parameters(ours), theirs) == set()


def test_gradients_reach_every_parameter() -> None:
    model: Any = StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES))
    mimetic_initialization(model)
    tokens = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"layers": [0, 3]}, "some of 0 to 2"),
        ({"layers": [-1]}, "some of 0 to 2"),
        ({"layers": []}, "some of 0 to 2"),
        ({"c": 0.0}, "c must be"),
        ({"c": -1.0}, "c must be"),
        ({"c": math.nan}, "c must be"),
        ({"c": math.inf}, "c must be"),
        ({"offset": -1}, "offset must be"),
        ({"offset": 0.5}, "offset must be"),
    ],
    ids=str,
)
def test_an_impossible_argument_is_refused_and_nothing_changed(arguments: dict[str, Any], complaint: str) -> None:
    model = stateful_model()
    before = parameters(model)
    with pytest.raises(ValueError, match=complaint):
        mimetic_initialization(model, **arguments)
    assert changed_names(before, model) == set()


def test_a_model_without_mamba2_mixers_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no Mamba-2 mixer"):
        mimetic_initialization(nn.Linear(2, 2))
    mamba1 = MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=4, state_size=3, num_hidden_layers=1))
    with pytest.raises(ValueError, match="no Mamba-2 mixer"):
        mimetic_initialization(mamba1)


def test_another_layout_of_the_input_projection_is_refused_and_nothing_changed() -> None:
    model: Any = stateful_model()
    model.backbone.layers[2].mixer.in_proj = nn.Linear(4, 34)
    before = parameters(model)
    with pytest.raises(ValueError, match="in_proj has 34 rows"):
        mimetic_initialization(model)
    assert changed_names(before, model) == set()
