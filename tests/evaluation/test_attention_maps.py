import hashlib
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus
from transformers import MambaConfig, MambaForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_recurrent_lengthgen.evaluation.recorded_scans import recorded_scans
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps, channel_maps, projection_correlations
from hf_recurrent_lengthgen.metrics.maps.result import read_maps, save_maps
from hf_recurrent_lengthgen.models import (
    StatefulDeltaNetConfig,
    StatefulDeltaNetForCausalLM,
    StatefulGatedDeltaNetConfig,
    StatefulGatedDeltaNetForCausalLM,
    StatefulGLAConfig,
    StatefulGLAForCausalLM,
    StatefulHGRN2Config,
    StatefulHGRN2ForCausalLM,
    StatefulKDAConfig,
    StatefulKDAForCausalLM,
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
    StatefulMamba3Config,
    StatefulMamba3ForCausalLM,
    StatefulMambaConfig,
    StatefulMambaForCausalLM,
    StatefulRWKV6Config,
    StatefulRWKV6ForCausalLM,
    StatefulRWKV7Config,
    StatefulRWKV7ForCausalLM,
)
from hf_recurrent_lengthgen.surgery import mimetic_initialization

ALL = slice(None)
SIZES: dict[str, Any] = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2}
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])


def randomized(model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
    return model.eval()


def mamba(**changes: Any) -> Any:
    fields = {"state_size": 3, "time_step_rank": 2} | changes
    return randomized(StatefulMambaForCausalLM(StatefulMambaConfig(**(SIZES | fields))))


def falcon_mamba() -> Any:
    return mamba(mixer_rms_eps=1e-6)


def mamba2(**changes: Any) -> Any:
    fields = {"num_heads": 4, "head_dim": 4, "n_groups": 2, "state_size": 3, "time_step_limit": (0.1, 0.9)}
    return randomized(StatefulMamba2ForCausalLM(StatefulMamba2Config(**(SIZES | fields | changes))))


def gla(**changes: Any) -> Any:
    fields = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 12, "gate_low_rank_dim": 3}
    return randomized(StatefulGLAForCausalLM(StatefulGLAConfig(**(SIZES | fields | changes))))


def seen(model: Any, *names: str, layer: int = 1) -> dict[str, tuple[Any, Any]]:
    """Inputs and outputs of modules of a layer's mixer while the model reads IDS."""
    block = model.base_model.layers[layer]
    mixer = block.mixer if hasattr(block, "mixer") else block.attn
    found: dict[str, tuple[Any, Any]] = {}

    def hook(name: str) -> Any:
        return lambda _, args, out: found.__setitem__(name, (args, out))

    hooks = [mixer.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    with torch.no_grad():
        model(IDS[None])
    for each in hooks:
        each.remove()
    return found


def loop(C: Tensor, decays: Tensor, B: Tensor) -> Tensor:
    """Eq. 8 for one channel, its indicator put right: C and discretized B (T, N), decays diag(A_k) (T, N)."""
    length = len(C)
    M = torch.zeros(length, length)
    for i in range(length):
        for j in range(i + 1):
            product = torch.ones(C.shape[1])
            for k in range(j + 1, i + 1):
                product = product * decays[k]
            M[i, j] = (C[i] * product * B[j]).sum()
    return M


def mamba1_channels(model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Delta (T, D), A (D, N), B and C (T, N) from the modules of layer 1."""
    found, mixer = seen(model, "x_proj", "dt_proj"), model.backbone.layers[1].mixer
    B, C = found["x_proj"][1][0, :, 2:].split(3, -1)
    if model.config.mixer_rms_eps is not None:
        B, C = (v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() for v in (B, C))
    return softplus(found["dt_proj"][1][0]), -mixer.A_log.detach().exp(), B, C


@pytest.mark.parametrize("make", [mamba, falcon_mamba])
def test_mamba1_maps_equal_a_loop(make: Any) -> None:
    model = make()
    dt, A, B, C = mamba1_channels(model)
    maps = channel_maps(model, IDS, 1, ALL)
    assert maps.shape == (16, 7, 7)
    for d in range(16):
        expected = loop(C, (dt[:, d, None] * A[d]).exp(), dt[:, d, None] * B)
        torch.testing.assert_close(maps[d].float(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(channel_maps(model, IDS, 1, slice(5, 8)), maps[5:8])


def mamba2_heads(model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x (T, H, P), Delta (T, H), A (H,), B and C (T, G, N) from the modules of layer 1."""
    found, mixer = seen(model, "in_proj", "conv1d"), model.backbone.layers[1].mixer
    x, B, C = found["conv1d"][1][0][0].split([16, 6, 6], -1)
    dt = softplus(found["in_proj"][1][0, :, -4:] + mixer.dt_bias.detach()).clamp(*model.config.time_step_limit)
    return x.unflatten(-1, (4, 4)), dt, -mixer.A_log.detach().exp(), B.unflatten(-1, (2, 3)), C.unflatten(-1, (2, 3))


def test_mamba2_maps_equal_a_loop() -> None:
    model = mamba2()
    _, dt, A, B, C = mamba2_heads(model)
    maps = channel_maps(model, IDS, 1, ALL)
    for h in range(4):
        decays = (dt[:, h, None] * A[h]).exp().expand(-1, 3)
        expected = loop(C[:, h // 2], decays, dt[:, h, None] * B[:, h // 2])
        torch.testing.assert_close(maps[h].float(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(channel_maps(model, IDS, 1, slice(1, 4)), maps[1:])


def test_gla_maps_equal_a_loop() -> None:
    model = gla()
    found = seen(model, "q_proj", "k_proj", "gk_proj")
    q = found["q_proj"][1][0].unflatten(-1, (2, 2)) / math.sqrt(2)
    k, gates = found["k_proj"][1][0], (logsigmoid(found["gk_proj"][1][0]) / 16).exp()
    maps = channel_maps(model, IDS, 1, ALL)
    assert maps.shape == (2, 7, 7)
    for h in range(2):
        torch.testing.assert_close(maps[h].float(), loop(q[:, h], gates, k), rtol=1e-5, atol=1e-6)


def test_mamba1_maps_applied_to_x_are_the_output_of_the_scan() -> None:
    model = mamba()
    found, mixer = seen(model, "in_proj", "x_proj", "out_proj"), model.backbone.layers[1].mixer
    x, gate = found["x_proj"][0][0][0], found["in_proj"][1][0].chunk(2, -1)[1]
    y = torch.einsum("dij,jd->id", channel_maps(model, IDS, 1, ALL).float(), x) + mixer.D.detach() * x
    torch.testing.assert_close(y * silu(gate), found["out_proj"][0][0][0], rtol=1e-5, atol=1e-5)


def test_mamba2_maps_applied_to_x_are_the_output_of_the_scan() -> None:
    model = mamba2()
    found, mixer = seen(model, "norm"), model.backbone.layers[1].mixer
    x, *_ = mamba2_heads(model)
    y = torch.einsum("hij,jhp->ihp", channel_maps(model, IDS, 1, ALL).float(), x) + mixer.D.detach()[:, None] * x
    torch.testing.assert_close(y.flatten(1), found["norm"][0][0][0], rtol=1e-5, atol=1e-5)


def test_mamba3_maps_applied_to_x_are_the_output_of_the_scan() -> None:
    fields = {"head_dim": 4, "state_size": 6, "n_groups": 2}
    model = randomized(StatefulMamba3ForCausalLM(StatefulMamba3Config(**(SIZES | fields))))
    found, mixer = seen(model, "in_proj", "out_proj"), model.backbone.layers[1].mixer
    z, x, *_ = found["in_proj"][1][0].split(mixer.sizes, -1)
    x, heads = x.unflatten(-1, (-1, 4)), len(mixer.D)
    maps = channel_maps(model, IDS, 1, ALL)
    y = torch.einsum("hij,jhp->ihp", maps.float(), x) + mixer.D.detach()[:, None] * x
    torch.testing.assert_close(y.flatten(1) * silu(z), found["out_proj"][0][0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(channel_maps(model, IDS, 1, slice(1, 3)), maps[1:3])
    layer = attention_maps(model, IDS).layers[1]
    assert layer.kind == "Mamba-3"
    assert len(maps) == heads
    torch.testing.assert_close(torch.as_tensor(layer.average), maps.mean(0).float())


def hgrn2() -> Any:
    fields = {"num_heads": 2, "intermediate_size": 12, "expand_ratio": None}
    return randomized(StatefulHGRN2ForCausalLM(StatefulHGRN2Config(**(SIZES | fields))))


@pytest.mark.parametrize(
    ("make", "norm", "values"), [(gla, "g_norm_swish_gate", "v_proj"), (hgrn2, "g_norm", "i_proj")]
)
def test_gated_maps_applied_to_v_are_the_output_of_the_scan(make: Any, norm: str, values: str) -> None:
    model = make()
    found = seen(model, values, norm)
    v = found[values][1][0].unflatten(-1, (2, -1)) if make is hgrn2 else found[values][1][0][:, None].expand(-1, 2, -1)
    y = torch.einsum("hij,jhp->ihp", channel_maps(model, IDS, 1, ALL).float(), v)
    torch.testing.assert_close(y.flatten(), found[norm][0][0][0].flatten(), rtol=1e-5, atol=1e-5)


def delta_rule_heads(model: Any) -> tuple[Tensor, ...]:
    """q, k, w, a and b (T, H, N) and rates (T, H) of layer 1, from its modules and the papers' equations."""
    mixer = model.model.layers[1].attn
    if isinstance(model, StatefulRWKV7ForCausalLM):
        names = ("r_proj", "k_proj", "w_lora", "a_lora")
        found = {name: out[0] for name, (_, out) in seen(model, *names).items()}
        rate = found["a_lora"].sigmoid()
        kappa = (found["k_proj"] * mixer.k_k.detach()).unflatten(-1, (2, 4))
        kappa = kappa / kappa.norm(dim=-1, keepdim=True)
        k = found["k_proj"] * (1 + (rate - 1) * mixer.k_a.detach())
        w = torch.exp(-math.exp(-0.5) * found["w_lora"].sigmoid())
        q, k, w, rate = (x.unflatten(-1, (2, 4)) for x in (found["r_proj"], k, w, rate))
        return q, k, w, -kappa, kappa * rate, torch.ones(7, 2)
    projections = [name for name in ("a_proj", "f_proj", "b_proj") if hasattr(mixer, name)]
    found = {name: out[0] for name, (_, out) in seen(model, "q_proj", "k_proj", *projections).items()}
    q, k = (silu(found[name]).unflatten(-1, (2, -1)) for name in ("q_proj", "k_proj"))
    beta = 2 * found["b_proj"].sigmoid()
    q, k = (x[:, [h * 2 // beta.shape[1] for h in range(beta.shape[1])]] for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    w = torch.ones_like(k)
    if "a_proj" in found:
        w = w * torch.exp(-mixer.A_log.detach().exp() * softplus(found["a_proj"] + mixer.dt_bias.detach()))[..., None]
    if "f_proj" in found:
        step = softplus(found["f_proj"] + mixer.dt_bias.detach()).unflatten(-1, (beta.shape[1], -1))
        w = torch.exp(-mixer.A_log.detach().exp()[:, None] * step)
    return q / k.shape[-1] ** 0.5, k, w, w * k, -beta[..., None] * k, beta


def delta_rule(name: str) -> Any:
    makes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "DeltaNet": (StatefulDeltaNetForCausalLM, StatefulDeltaNetConfig, {"num_heads": 2}),
        "Gated DeltaNet": (StatefulGatedDeltaNetForCausalLM, StatefulGatedDeltaNetConfig, {"head_dim": 3}),
        "KDA": (StatefulKDAForCausalLM, StatefulKDAConfig, {"head_dim": 3}),
        "Gated DeltaNet, shared keys": (
            StatefulGatedDeltaNetForCausalLM,
            StatefulGatedDeltaNetConfig,
            {"head_dim": 3, "num_v_heads": 4},
        ),
        "KDA, shared keys": (StatefulKDAForCausalLM, StatefulKDAConfig, {"head_dim": 3, "num_v_heads": 4}),
        "RWKV-7": (StatefulRWKV7ForCausalLM, StatefulRWKV7Config, {"head_dim": 4}),
    }
    model_class, config_class, fields = makes[name]
    if name != "RWKV-7":
        fields |= {"num_heads": 2, "use_short_conv": False, "allow_neg_eigval": True}
    return randomized(model_class(config_class(**(SIZES | {"intermediate_size": 12} | fields))))


DELTA_RULES = ["DeltaNet", "Gated DeltaNet", "KDA", "Gated DeltaNet, shared keys", "KDA, shared keys"]


@pytest.mark.parametrize("name", [*DELTA_RULES, "RWKV-7"])
def test_maps_of_the_delta_rule_equal_products_of_matrices(name: str) -> None:
    model = delta_rule(name)
    q, k, w, a, b, beta = delta_rule_heads(model)
    heads = q.shape[1]
    maps, masks = torch.zeros(2, heads, 7, 7)
    for h in range(heads):
        for j in range(7):
            left = k[j, h]  # a row, which later transitions multiply from the right
            for i in range(j, 7):
                if i > j:
                    left = left @ (torch.diag(w[i, h]) + torch.outer(a[i, h], b[i, h]))
                maps[h, i, j], masks[h, i, j] = beta[j, h] * (left @ q[i, h]), left @ k[j, h] / (k[j, h] @ k[j, h])
    torch.testing.assert_close(channel_maps(model, IDS, 1, ALL).float(), maps, rtol=1e-4, atol=1e-5)
    layer = attention_maps(model, IDS).layers[1]
    np.testing.assert_allclose(layer.average, maps.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.mask, masks.mean(0), rtol=1e-4, atol=1e-5)
    linear = torch.einsum("ihn,jhn->ij", q, k).tril() / heads
    distance = float((maps.mean(0) - linear).norm() / linear.norm())
    assert (layer.kind, layer.cosine) == ("delta rule", None)
    assert layer.linear_distance == pytest.approx(distance, rel=1e-4)


@pytest.mark.parametrize("name", DELTA_RULES)
def test_maps_of_the_delta_rule_applied_to_v_are_the_output_of_the_scan(name: str) -> None:
    model = delta_rule(name)
    found = seen(model, "v_proj", "o_norm")
    maps = channel_maps(model, IDS, 1, ALL).float()
    v = silu(found["v_proj"][1][0]).unflatten(-1, (len(maps), -1))
    y = torch.einsum("hij,jhp->ihp", maps, v)
    torch.testing.assert_close(y, found["o_norm"][0][0][0], rtol=1e-4, atol=1e-5)


def test_a_key_of_zeros_writes_and_keeps_nothing() -> None:
    model = delta_rule("DeltaNet")
    with torch.no_grad():
        model.model.layers[1].attn.k_proj.weight.zero_()
    layer = attention_maps(model, IDS).layers[1]
    assert not layer.average.any()
    assert not layer.mask.any()


@pytest.mark.parametrize("make", [mamba, mamba2, gla])
def test_averages_are_those_of_all_channels_and_made_a_few_at_a_time(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    at_once: list[int] = []
    implementation = sys.modules[attention_maps.__module__]  # the package has the function by this name
    maps_of = implementation._maps

    def counted(*part: Tensor) -> Any:
        at_once.append(len(part[0]))
        return maps_of(*part)

    monkeypatch.setattr(implementation, "_maps", counted)
    monkeypatch.setattr(implementation, "MAP_ELEMENTS", 3 * 7 * 7)
    layer = attention_maps(model, IDS[None], label="m").layers[1]
    every = channel_maps(model, IDS, 1, ALL)
    assert max(at_once[:-1]) <= 3
    assert sum(at_once[:-1]) == 2 * len(every)  # two layers
    np.testing.assert_allclose(layer.average, every.mean(0), rtol=1e-5, atol=1e-6)


def test_masks_are_the_mean_of_all_decays() -> None:
    model = mamba()
    dt, A, *_ = mamba1_channels(model)
    expected = torch.zeros(7, 7)
    for i in range(7):
        for j in range(i + 1):
            expected[i, j] = (
                torch.stack([(dt[k, :, None] * A) for k in range(j + 1, i + 1)] or [A * 0]).sum(0).exp().mean()
            )
    mask = attention_maps(model, IDS, layers=[1]).layers[0].mask
    np.testing.assert_allclose(mask, expected, rtol=1e-5, atol=1e-6)
    heads = mamba2()
    _, dt, A, *_ = mamba2_heads(heads)
    mask = attention_maps(heads, IDS, layers=[1]).layers[0].mask
    assert mask[6, 2] == pytest.approx(float((dt[3:7].sum(0) * A).exp().mean()), rel=1e-5)
    assert mask[0].tolist() == [1, 0, 0, 0, 0, 0, 0]


def forced_to_linear_attention(model: Any) -> Any:
    """Decays of 1 and steps of 1 by the same parameters as mimetic initialization, but exactly."""
    mimetic_initialization(model, delta=True if not isinstance(model, StatefulGLAForCausalLM) else None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-40.0)
            if name.endswith("gk_proj.1.bias"):
                parameter.fill_(40.0)
            if name.endswith("in_proj.weight") and hasattr(model.config, "n_groups"):
                parameter[-4:] = 0  # of the steps
    return model


def test_with_decays_and_steps_of_1_mamba1_is_linear_attention_of_its_inputs() -> None:
    """Eq. 12 with its transpose put right: M = tril((W_C X)^T W_B X), the same for every channel."""
    model = forced_to_linear_attention(mamba())
    X, weight = seen(model, "x_proj")["x_proj"][0][0][0], model.backbone.layers[1].mixer.x_proj.weight.detach()
    expected = (X @ weight[5:].T @ (X @ weight[2:5].T).T).tril()
    for channel in channel_maps(model, IDS, 1, ALL).float():
        torch.testing.assert_close(channel, expected, rtol=1e-5, atol=1e-5)
    layer = attention_maps(model, IDS).layers[1]
    assert layer.linear_distance == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(layer.mask, np.tril(np.ones((7, 7))), rtol=1e-6)


def test_with_decays_and_steps_of_1_mamba2_and_gla_are_linear_attention() -> None:
    """In Mamba-2, B and C pass the convolution and SiLU after their projections."""
    model = forced_to_linear_attention(mamba2(time_step_limit=(0.0, math.inf)))
    *_, B, C = mamba2_heads(model)
    for head, channel in enumerate(channel_maps(model, IDS, 1, ALL).float()):
        expected = (C[:, head // 2] @ B[:, head // 2].T).tril()
        torch.testing.assert_close(channel, expected, rtol=1e-5, atol=1e-5)
    model = forced_to_linear_attention(gla())
    found = seen(model, "q_proj", "k_proj")
    q, k = found["q_proj"][1][0].unflatten(-1, (2, 2)) / math.sqrt(2), found["k_proj"][1][0]
    for head, channel in enumerate(channel_maps(model, IDS, 1, ALL).float()):
        torch.testing.assert_close(channel, (q[:, head] @ k.T).tril(), rtol=1e-5, atol=1e-5)


FULL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
FULL_MODELS: dict[str, Any] = {
    "Mamba-1": lambda: StatefulMambaForCausalLM(StatefulMambaConfig(**FULL, state_size=32)),
    "Mamba-2": lambda: StatefulMamba2ForCausalLM(
        StatefulMamba2Config(**FULL, num_heads=8, head_dim=16, n_groups=1, state_size=64)
    ),
    "GLA": lambda: StatefulGLAForCausalLM(StatefulGLAConfig(**FULL, num_heads=2, intermediate_size=64)),
}


@pytest.mark.parametrize(
    ("family", "plain", "mimetic", "states"),
    [
        ("Mamba-1", (0.98, 1.0), (0.05, 0.25), 32),
        ("Mamba-2", (0.98, 1.0), (0.1, 0.25), 8),
        ("GLA", (0.4, 0.6), (0.1, 0.25), 16),
    ],
)
def test_how_far_the_defaults_are_from_linear_attention(
    family: str, plain: tuple[float, float], mimetic: tuple[float, float], states: int
) -> None:
    """The decays of c = 8 are not 1: exp(-1) for n = 1 and exp(-1 / 256) for n = 2 in each step of 1."""
    torch.manual_seed(0)
    model = FULL_MODELS[family]()
    ids = torch.randint(64, (50,))
    distances = [layer.linear_distance for layer in attention_maps(model, ids).layers]
    assert all(plain[0] < distance < plain[1] for distance in distances if distance is not None)
    mimetic_initialization(model)
    layers = attention_maps(model, ids).layers
    distances = [layer.linear_distance for layer in layers]
    assert all(mimetic[0] < distance < mimetic[1] for distance in distances if distance is not None)
    left = sum(math.exp(-49 * n**-8) for n in range(1, states + 1)) / states
    # in Mamba-2, steps also depend on the token
    assert [float(layer.mask[-1, 0]) for layer in layers] == pytest.approx(
        [left] * 2, abs=0.01 if family == "Mamba-2" else 1e-5
    )


def test_softmax_and_linear_attention_layers_have_maps_too() -> None:
    model = mamba2(attention_layers=[1], attention_head_dim=5)
    found = seen(model, "q_proj", "k_proj")
    q, k = (found[name][1][0] for name in ("q_proj", "k_proj"))
    maps = attention_maps(model, IDS)
    assert [layer.kind for layer in maps.layers] == ["Mamba-2", "softmax attention"]
    for i in range(7):
        weights = torch.stack([(q[i] @ k[j] / math.sqrt(5)).exp() for j in range(i + 1)])
        np.testing.assert_allclose(maps.layers[1].average[i, : i + 1], weights / weights.sum(), rtol=1e-4)
    assert not maps.layers[1].average[np.triu_indices(7, 1)].any()
    assert (maps.layers[1].linear_distance, maps.layers[1].cosine) == (None, None)
    linear = attention_maps(mamba2(attention_layers=[1], attention_kind="linear"), IDS).layers[1]
    assert (linear.kind, linear.linear_distance) == ("linear attention", pytest.approx(0, abs=1e-6))


def test_correlations_by_hand() -> None:
    model = mamba()
    weight = model.backbone.layers[0].mixer.x_proj.weight
    with torch.no_grad():
        weight.zero_()
        weight[2:5, :3] = torch.eye(3)  # W_B
        weight[5:, :3] = 2 * torch.eye(3)  # W_C
    cosine, identity = projection_correlations(model)[0]
    assert cosine == pytest.approx(1)
    assert identity == pytest.approx(math.sqrt(3 / 16))  # rank 3 of 16 channels
    with torch.no_grad():
        weight[5, :3] = torch.tensor([0.0, 0.0, 2.0])
        weight[7, :3] = torch.tensor([2.0, 0.0, 0.0])
    cosine, identity = projection_correlations(model)[0]
    assert cosine == pytest.approx(1 / 3)
    assert identity == pytest.approx(1 / 3 * math.sqrt(3 / 16))


@torch.no_grad()
@pytest.mark.parametrize("make", [mamba, mamba2, gla])
def test_correlations_equal_products_of_the_whole_matrices(make: Any) -> None:
    model = make()
    mixer = model.base_model.layers[1].attn if make is gla else model.base_model.layers[1].mixer
    if make is gla:
        pairs = [(mixer.k_proj.weight, part) for part in mixer.q_proj.weight.chunk(2)]
    elif make is mamba:
        pairs = [(mixer.x_proj.weight[2:5], mixer.x_proj.weight[5:])]
    else:
        pairs = list(zip(mixer.in_proj.weight[32:38].chunk(2), mixer.in_proj.weight[38:44].chunk(2), strict=True))
    cosines, identities = [], []
    for W_B, W_C in pairs:
        cosines.append(torch.cosine_similarity(W_B.flatten(), W_C.flatten(), dim=0))
        product = W_C.T @ W_B
        identities.append(torch.cosine_similarity(product.flatten(), torch.eye(len(product)).flatten(), dim=0))
    expected = [float(torch.stack(values).mean()) for values in (cosines, identities)]
    assert projection_correlations(model)[1] == pytest.approx(expected, abs=1e-5)


def test_mimetic_projections_are_correlated_and_models_of_transformers_covered() -> None:
    model = MambaForCausalLM(MambaConfig(**FULL, state_size=32))
    assert abs(projection_correlations(model)[1].cosine) < 0.05
    mimetic_initialization(model, layers=[1])
    assert projection_correlations(model)[1].cosine == pytest.approx(1 / math.sqrt(2), abs=0.02)
    assert abs(projection_correlations(model)[0].cosine) < 0.05
    assert projection_correlations(nn.Linear(2, 2)) == {}


def test_nothing_is_left_behind() -> None:
    model = mamba().train()
    attention_maps(model, IDS)
    assert model.training
    assert not any("scan" in vars(block.mixer) for block in model.backbone.layers)
    with pytest.raises(ValueError, match="inside"), recorded_scans(model, {"scan_selective": print}):
        raise ValueError("inside")
    assert not any("scan" in vars(block.mixer) for block in model.backbone.layers)


def test_a_model_with_the_code_of_its_checkpoint(tmp_path: Path) -> None:
    ours = mamba2()
    ours.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        remote: Any = get_class_from_dynamic_module("modeling_stateful_mamba2.StatefulMamba2ForCausalLM", tmp_path)
    model = remote.from_pretrained(tmp_path)
    assert not isinstance(model, StatefulMamba2ForCausalLM)
    assert torch.equal(channel_maps(model, IDS, 1, ALL), channel_maps(ours, IDS, 1, ALL))


def test_files_hold_everything(tmp_path: Path) -> None:
    maps = attention_maps(mamba(attention_layers=[0]), IDS, list("abcdefg"), label="a model")
    save_maps(tmp_path / "maps.npz", maps)
    with np.load(tmp_path / "maps.npz") as file:
        header, average, mask = json.loads(str(file["header"])), file["average"], file["mask"]
    assert (header["model"], header["tokens"]) == ("a model", list("abcdefg"))
    for place, (before, after) in enumerate(zip(maps.layers, header["layers"], strict=True)):
        assert np.array_equal(before.average, average[place])
        assert np.array_equal(before.mask, mask[place])
        for name in ("layer", "kind", "cosine", "identity", "linear_distance"):
            assert getattr(before, name) == after[name]


def damaged(path: Path, **changes: Any) -> Path:
    """The file with another array, or another field of its header; None takes it away."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    for name, value in changes.items():
        place = arrays if name in arrays else header
        place.pop(name) if value is None else place.__setitem__(name, value)
    np.savez(path, **arrays | {"header": np.array(json.dumps(header))})
    return path


def test_files_are_read_again_and_name_what_they_are_of(tmp_path: Path) -> None:
    model = mamba(attention_layers=[0])
    maps = attention_maps(model, IDS, command="lengthgen maps m")
    save_maps(path := tmp_path / "maps.npz", maps)
    read = read_maps(path)
    assert vars(read) | {"layers": ()} == vars(maps) | {"layers": ()}
    for before, after in zip(maps.layers, read.layers, strict=True):
        assert np.array_equal(before.average, after.average)
        assert np.array_equal(before.mask, after.mask)
        assert (before.kind, before.cosine) == (after.kind, after.cosine)
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(f"{name} torch.float32 {tuple(value.shape)}".encode() + value.numpy().tobytes())
    assert read.weights == weights.hexdigest()
    ids = IDS.numpy().astype("<i8")
    assert read.data.digest == hashlib.sha256(f"(1, {len(ids)})".encode() + ids.tobytes()).hexdigest()
    assert (read.device, read.command, read.versions["torch"]) == ("cpu", "lengthgen maps m", torch.__version__)
    assert read.wall_seconds > 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weights": None}, "weights: Field required"),
        ({"command": None}, "command: Field required"),
        ({"more": 1}, "more: There is no such field"),
        ({"schema_version": 3}, "schema version 3, .* reads up to 2"),
        ({"kind": "evaluation"}, "Expected a document of kind 'attention_maps'"),
        ({"mask": None}, "mask"),
        ({"average": np.zeros((1, 2, 2))}, "must have"),
    ],
    ids=str,
)
def test_files_that_are_damaged_or_newer_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    save_maps(path := tmp_path / "maps.npz", attention_maps(mamba(), IDS))
    with pytest.raises(ValueError, match=rf"maps.npz: .*{complaint}"):
        read_maps(damaged(path, **changes))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"maps.npz"):
        read_maps(path)


def test_numbers_that_are_not_finite_are_null_in_files(tmp_path: Path) -> None:
    model = mamba()
    with torch.no_grad():
        model.backbone.layers[0].mixer.x_proj.weight.zero_()
    save_maps(tmp_path / "maps.npz", attention_maps(model, IDS))
    with np.load(tmp_path / "maps.npz") as file:
        layer = json.loads(str(file["header"]), parse_constant=pytest.fail)["layers"][0]
    assert (layer["layer"], layer["cosine"], layer["identity"]) == (0, None, None)


def test_recordings_may_be_nested() -> None:
    model, outer, inner = mamba(), list[int](), list[int]()
    with torch.no_grad(), recorded_scans(model, {"scan_selective": lambda layer, *_: outer.append(layer)}):
        with recorded_scans(model, {"scan_selective": lambda layer, *_: inner.append(layer)}):
            model(IDS[None])
        model(IDS[None])
    assert (outer, inner) == ([0, 1] * 2, [0, 1])
    assert "scan" not in vars(model.backbone.layers[0].mixer)


def test_an_error_in_writing_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "maps.npz"
    maps = attention_maps(mamba(), IDS)
    save_maps(path, maps)
    before = path.read_bytes()

    def fail(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", fail)
        with pytest.raises(OSError, match="disk full"):
            save_maps(path, maps)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_smaller_steps_are_in_the_maps() -> None:
    whole, halved = (
        channel_maps(mamba(**fields), IDS, 0, ALL) for fields in ({}, {"forgetting": {"delta_scale": 0.5}})
    )
    diagonals = [maps.diagonal(dim1=1, dim2=2) for maps in (whole, halved)]
    torch.testing.assert_close(diagonals[1], diagonals[0] / 2)  # C_i . B_i Delta_i, without decay


@pytest.mark.parametrize(
    ("make", "arguments", "complaint"),
    [
        (
            mamba,
            {"input_ids": torch.ones(2, 3, dtype=torch.long)},
            r"must be one text, \(T,\) or \(1, T\), got \(2, 3\)",
        ),
        (mamba, {"tokens": ["a"]}, "one word per token, 7, got 1"),
        (mamba, {"layers": [2]}, r"some of 0 to 1, got \[2\]"),
        (mamba, {"layers": []}, "some of 0 to 1"),
        (lambda: mamba(forgetting={"window": 3}), {}, "switch forgetting off"),
        (
            lambda: StatefulRWKV6ForCausalLM(StatefulRWKV6Config(**SIZES, num_heads=2, intermediate_size=8)),
            {},
            r"layers \[0, 1\] of StatefulRWKV6ForCausalLM have no attention maps",
        ),
        (
            lambda: MambaForCausalLM(MambaConfig(**SIZES)),
            {},
            "layers of MambaForCausalLM are not known to this package",
        ),
    ],
    ids=["texts", "words", "layer", "no layer", "forgetting", "RWKV", "stock"],
)
def test_what_has_no_maps_is_refused(make: Any, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        attention_maps(make(), **({"input_ids": IDS} | arguments))
