import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import FalconMambaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaForCausalLM

from hf_recurrent_lengthgen.models import (
    StatefulGLAConfig,
    StatefulGLAForCausalLM,
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
    StatefulMambaConfig,
    StatefulMambaForCausalLM,
)
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import randomized

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
    "delta": {"mixer.dt_bias", "mixer.in_proj.weight", "mixer.in_proj.bias"},
    "bc": {"mixer.in_proj.weight"},
    "conv": {"mixer.conv1d.weight", "mixer.conv1d.bias"},
}


def drawn(model: nn.Module) -> Any:
    """Every parameter random, but for the decays, which are as drawn."""
    decays = {name: value for name, value in parameters(model).items() if name.endswith("A_log")}
    randomized(model).load_state_dict(decays, strict=False)
    return model


def stateful_model(**changes: Any) -> nn.Module:
    return drawn(StatefulMamba2ForCausalLM(StatefulMamba2Config(**{**SIZES, **changes})))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed_names(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}


def only(switch: str) -> dict[str, bool]:
    return {name: name == switch for name in SWITCHES}


def test_a_step_is_one_whatever_the_input() -> None:
    model: Any = stateful_model()
    mixer = model.backbone.layers[2].mixer
    others = mixer.in_proj.weight[:28].detach().clone()
    mimetic_initialization(model, **only("delta"))
    torch.testing.assert_close(mixer.dt_bias, torch.tensor([0.5413249, 0.5413249]))
    steps = torch.nn.functional.softplus(mixer.in_proj(torch.randn(5, 4))[:, 28:] + mixer.dt_bias)
    torch.testing.assert_close(steps, torch.ones(5, 2))
    assert torch.equal(mixer.in_proj.weight[:28], others)


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


def test_all_switches_are_on_by_default_and_in_all_layers_and_the_config_stays() -> None:
    model: Any = stateful_model()
    before, config = parameters(model), copy.deepcopy(model.config.to_dict())
    mimetic_initialization(model)
    names = set().union(*CHANGED.values())
    assert changed_names(before, model) == {f"backbone.layers.{layer}.{name}" for layer in range(3) for name in names}
    assert model.config.to_dict() == config


# Mamba-1: inner size 8, N = 3, R = 2; x_proj rows are dt 0-1, B 2-4, C 5-7
MAMBA1_SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 4,
    "expand": 2,
    "state_size": 3,
    "time_step_rank": 2,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
}
MAMBA1_CHANGED = {
    "a": {"mixer.A_log"},
    "delta": {"mixer.dt_proj.weight", "mixer.dt_proj.bias"},
    "bc": {"mixer.x_proj.weight"},
    "conv": {"mixer.conv1d.weight", "mixer.conv1d.bias"},
}


def mamba1_model(**changes: Any) -> Any:
    return drawn(StatefulMambaForCausalLM(StatefulMambaConfig(**{**MAMBA1_SIZES, **changes})))


def test_mamba1_a_step_is_one_whatever_the_input() -> None:
    model = mamba1_model()
    rows = model.backbone.layers[2].mixer.x_proj.weight.detach().clone()
    mimetic_initialization(model, **only("delta"))
    mixer = model.backbone.layers[2].mixer
    steps = torch.nn.functional.softplus(mixer.dt_proj(torch.randn(5, 2)))
    torch.testing.assert_close(steps, torch.ones(5, 8))
    assert torch.equal(mixer.x_proj.weight, rows)


def test_mamba1_c_rows_become_the_mean_of_b_and_c_rows() -> None:
    model = mamba1_model()
    projection = model.backbone.layers[0].mixer.x_proj
    with torch.no_grad():
        projection.weight.copy_(torch.arange(8.0)[:, None].expand(8, 8))
    mimetic_initialization(model, **only("bc"))
    expected = torch.tensor([0.0, 1, 2, 3, 4, 3.5, 4.5, 5.5])
    assert torch.equal(projection.weight, expected[:, None].expand(8, 8))


def test_mamba1_keeps_its_convolution_by_default() -> None:
    model = mamba1_model()
    before = parameters(model)
    mimetic_initialization(model)
    names = set().union(*(MAMBA1_CHANGED[switch] for switch in ("a", "delta", "bc")))
    assert changed_names(before, model) == {f"backbone.layers.{layer}.{name}" for layer in range(3) for name in names}
    mimetic_initialization(model, a=False, conv=True)
    assert model.backbone.layers[1].mixer.conv1d.weight[:, 0].tolist() == [[0.0, 0.0, 0.0, 1.0]] * 8


@pytest.mark.parametrize(
    ("make", "changed"), [(stateful_model, CHANGED), (lambda: mamba1_model(mixer_rms_eps=1e-6), MAMBA1_CHANGED)]
)
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_its_own_parameters_of_the_chosen_layers_only(
    switch: str, make: Callable[[], nn.Module], changed: dict[str, set[str]]
) -> None:
    model = make()
    before = parameters(model)
    mimetic_initialization(model, **only(switch), layers=[2, 0, 2])
    assert changed_names(before, model) == {f"backbone.layers.{i}.{name}" for i in (0, 2) for name in changed[switch]}


@pytest.mark.parametrize(
    ("make", "stock", "sizes"),
    [
        (stateful_model, Mamba2ForCausalLM, SIZES),
        (mamba1_model, MambaForCausalLM, MAMBA1_SIZES),
        (mamba1_model, FalconMambaForCausalLM, MAMBA1_SIZES),
    ],
)
def test_stock_mixers_get_the_same_weights(make: Callable[[], nn.Module], stock: Any, sizes: dict[str, Any]) -> None:
    ours, theirs = make(), stock(stock.config_class(**sizes))
    theirs.load_state_dict(ours.state_dict())
    mimetic_initialization(ours, c=3.0, offset=1)
    mimetic_initialization(theirs, c=3.0, offset=1, layers=[0, 1, 2, 1])  # a layer named twice is changed once
    assert changed_names(parameters(ours), theirs) == set()


# GLA: 2 heads of 3 keys and 4 values
GLA_SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_heads": 2,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "gate_low_rank_dim": 5,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
}


def gla_model(**changes: Any) -> Any:
    return randomized(StatefulGLAForCausalLM(StatefulGLAConfig(**{**GLA_SIZES, **changes})))


@pytest.mark.parametrize("normalizer", [1, 16])
def test_gla_gates_are_those_decays_whatever_the_input(normalizer: int) -> None:
    model = gla_model(gate_logit_normalizer=normalizer)
    gates = model.model.layers[1].attn.gk_proj
    for offset, decays in ((0, [-1.0, -1 / 4, -1 / 9]), (1, [-1 / 4, -1 / 9, -1 / 16])):
        mimetic_initialization(model, **only("a"), c=2.0, offset=offset)
        log_gates = torch.nn.functional.logsigmoid(gates(torch.randn(7, 12))) / normalizer
        torch.testing.assert_close(log_gates, torch.tensor(decays).repeat(2).expand(7, 6))
    mimetic_initialization(model, **only("a"))
    log_gates = torch.nn.functional.logsigmoid(gates(torch.randn(1, 12))) / normalizer
    torch.testing.assert_close(log_gates[0, 3:], torch.tensor([-1.0, -(2.0**-8), -(3.0**-8)]))


def test_gla_queries_become_the_mean_of_queries_and_keys_of_the_same_head() -> None:
    model = gla_model(num_heads=4, num_kv_heads=2, expand_k=1.0)
    mixer = model.model.layers[0].attn
    with torch.no_grad():
        mixer.q_proj.weight.copy_(torch.arange(12.0)[:, None].expand(12, 12))
        mixer.k_proj.weight.copy_(torch.tensor([100.0, 200, 300, 1000, 2000, 3000])[:, None].expand(6, 12))
    mimetic_initialization(model, **only("bc"))
    keys = [100, 200, 300, 100, 200, 300, 1000, 2000, 3000, 1000, 2000, 3000]
    assert mixer.q_proj.weight[:, 5].tolist() == [(row + key) / 2 for row, key in enumerate(keys)]


def test_gla_convolutions_become_the_identity_where_there_are_some() -> None:
    model = gla_model(use_short_conv=True, conv_size=3)
    before = parameters(model)
    mimetic_initialization(model, layers=[1])
    names = {"q_proj.weight", "gk_proj.1.weight", "gk_proj.1.bias"}
    names |= {f"{name}_conv1d.weight" for name in "qkv"}
    assert changed_names(before, model) == {f"model.layers.1.attn.{name}" for name in names}
    assert model.model.layers[1].attn.v_conv1d.weight.tolist() == [[[0.0, 0.0, 1.0]]] * 12


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba2"])
def test_layers_of_hybrids_are_those_of_the_model(model_type: str) -> None:
    model = drawn(tiny_model(model_type))
    before = parameters(model)
    mixers = sorted(int(name.split(".")[2]) for name in before if name.endswith("A_log"))
    mimetic_initialization(model, a=False, layers=mixers[-1:])
    assert {int(name.split(".")[2]) for name in changed_names(before, model)} == {mixers[-1]}
    mimetic_initialization(model, c=2.0, offset=1)
    weights = dict(model.named_parameters())
    for name, value in weights.items():
        if name.endswith("A_log"):
            torch.testing.assert_close(value.exp(), (before[name].exp() + 1) ** -2)
        if name.endswith("mixer.dt_bias") or name.endswith("mamba.dt_bias"):
            # Mamba-2: the last rows of in_proj make the steps
            assert not weights[name.replace("dt_bias", "in_proj.weight")][-len(value) :].any()


@pytest.mark.parametrize("make", [stateful_model, mamba1_model, gla_model], ids=["Mamba-2", "Mamba-1", "GLA"])
def test_gradients_reach_all_but_the_parameters_behind_a_zero_weight(make: Any) -> None:
    """The zero factor itself moves at the first step, the one before it from the second on."""
    torch.manual_seed(0)
    model = type(make())(make().config)
    mimetic_initialization(model, c=2.0)
    tokens = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    without = []
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        without.append([name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0])
    assert all(name.endswith(("gk_proj.0.weight",)) for name in without[0])
    assert without[1] == []


def adapted(model: nn.Module, target: str) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=[target], init_lora_weights="pissa"))  # type: ignore[arg-type]


def with_layout() -> Any:
    model: Any = stateful_model()
    model.backbone.layers[2].mixer.in_proj = nn.Linear(4, 34)
    return model


def initialized() -> Any:
    model: Any = stateful_model()
    mimetic_initialization(model, layers=[1])
    return model


def with_slow_head() -> Any:
    """As training may leave it."""
    model: Any = mamba1_model()
    model.backbone.layers[2].mixer.A_log.data[5, 1] = -1e-3
    return model


def normed() -> Any:
    model: Any = stateful_model()
    torch.nn.utils.parametrizations.weight_norm(model.backbone.layers[1].mixer.in_proj)
    return model


def packed() -> Any:
    model: Any = stateful_model()
    projection = model.backbone.layers[2].mixer.in_proj
    projection.weight = nn.Parameter(torch.ones_like(projection.weight, dtype=torch.int8), requires_grad=False)
    return model


def clamped(stock: bool, low: float, high: float) -> Any:
    fields = {**SIZES, "time_step_limit": (low, high)}
    return drawn(Mamba2ForCausalLM(Mamba2Config(**fields, expand=2))) if stock else stateful_model(**fields)


CLAMPED = r"layer 0 clamps them to .*time_step_limit with 1 inside.* or delta=False"
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (stateful_model, {"layers": [0, 3]}, r"some of \[0, 1, 2\]"),
    (stateful_model, {"layers": []}, r"some of \[0, 1, 2\]"),
    (lambda: stateful_model(attention_layers=[1]), {"layers": [1]}, r"some of \[0, 2\], got \[1\]"),
    *((stateful_model, {"c": c}, "c must be") for c in (0.0, math.nan, math.inf)),
    (stateful_model, {"offset": -1}, "offset at least 0"),
    (lambda: nn.Linear(2, 2), {}, r"Linear has no mixer of Mamba-1 .*, Mamba-2 .* or GLA"),
    (with_layout, {}, "in_proj has 34 rows"),
    (lambda: clamped(False, 0.001, 0.1), {}, CLAMPED),
    (lambda: clamped(True, 1.5, 2.0), {"delta": True}, CLAMPED),
    (
        lambda: adapted(stateful_model(), "in_proj"),
        {},
        r"Layer 0 .* cannot .* it has adapters, .*: add them",
    ),
    (lambda: adapted(gla_model(), "q_proj"), {}, r"Layer 0 \(GLA\) cannot .* it has adapters"),
    *((initialized, {"offset": n}, r"layer 1 \(Mamba-2\) slower: its least A_log is -5.55") for n in (0, 1)),
    (with_slow_head, {}, r"layer 2 \(Mamba-1\) slower: its least A_log is -0.001, .* Give a new model, once"),
    (normed, {}, r"Layer 1 \(Mamba-2\) .* weights that are computed from others: remove the parametrization"),
    (packed, {}, "Layer 2 .* quantized ones: give a model with its weights"),
    (gla_model, {"delta": True}, r"delta does not exist in layer 0 \(GLA\): GLA has no step size"),
    (gla_model, {"conv": True}, r"conv does not exist in layer 0 \(GLA\): it has no short convolution"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_is_refused_and_nothing_changed(
    make: Callable[[], Any], arguments: dict[str, Any], message: str
) -> None:
    model = make()
    before = parameters(model)
    with pytest.raises(ValueError, match=message):
        mimetic_initialization(model, **arguments)
    assert changed_names(before, model) == set()
