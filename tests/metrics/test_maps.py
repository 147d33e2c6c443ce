"""Attention maps equal loops from their definition, and applied to the inputs the outputs of the scans."""

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.maps.measure import _scans, attention_maps
from hf_recurrent_lengthgen.models import (
    StatefulGLAConfig,
    StatefulGLAForCausalLM,
    StatefulHGRN2Config,
    StatefulHGRN2ForCausalLM,
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
    StatefulMamba3Config,
    StatefulMamba3ForCausalLM,
    StatefulMambaConfig,
    StatefulMambaForCausalLM,
)
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from tests.hybrids.tiny_models import tiny_model
from tests.models import families

ALL, SOFTMAX = slice(None), "softmax attention"
SIZES: dict[str, Any] = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2}
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])


@torch.no_grad()
def channel_maps(model: Any, input_ids: Tensor, layer: int, channels: slice) -> Tensor:
    """M_d (Eq. 8) of some channels (heads) of a layer, (c, T, T); those of its scan, if it has attention, too."""
    scan = _scans(model, torch.atleast_2d(input_ids), [layer])[0][1]
    return scan[channels] if isinstance(scan, Tensor) else scan.maps(channels)[0]


def randomized(model: Any, seed: int = 0) -> Any:
    return families.randomized(model, seed, std=0.7).eval()


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


def test_mamba2_maps_applied_to_x_are_the_output_of_the_scan() -> None:
    model = mamba2()
    found, mixer = seen(model, "norm"), model.backbone.layers[1].mixer
    x, *_ = mamba2_heads(model)
    maps = channel_maps(model, IDS, 1, ALL)
    y = torch.einsum("hij,jhp->ihp", maps.float(), x) + mixer.D.detach()[:, None] * x
    torch.testing.assert_close(y.flatten(1), found["norm"][0][0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(channel_maps(model, IDS, 1, slice(1, 4)), maps[1:])


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


@pytest.mark.parametrize("make", [mamba, mamba2, gla])
def test_averages_are_those_of_all_channels(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    implementation = sys.modules[attention_maps.__module__]  # the package has the function by this name
    monkeypatch.setattr(implementation, "MAP_ELEMENTS", 3 * 7 * 7)  # three channels at a time
    layer = attention_maps(model, IDS[None], label="m").layers[1]
    np.testing.assert_allclose(layer.average, channel_maps(model, IDS, 1, ALL).mean(0), rtol=1e-5, atol=1e-6)


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


def test_with_decays_and_steps_of_1_mamba1_is_linear_attention_of_its_inputs() -> None:
    """Eq. 12 with its transpose put right: M = tril((W_C X)^T W_B X), the same for every channel."""
    model = mamba()
    mimetic_initialization(model, a=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-40.0)
    X, weight = seen(model, "x_proj")["x_proj"][0][0][0], model.backbone.layers[1].mixer.x_proj.weight.detach()
    expected = (X @ weight[5:].T @ (X @ weight[2:5].T).T).tril()
    for channel in channel_maps(model, IDS, 1, ALL).float():
        torch.testing.assert_close(channel, expected, rtol=1e-5, atol=1e-5)
    layer = attention_maps(model, IDS).layers[1]
    assert layer.linear_distance == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(layer.mask, np.tril(np.ones((7, 7))), rtol=1e-6)


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


STOCK: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(intermediate_size=8, num_attention_heads=4, num_key_value_heads=2, **SIZES)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=8, n_head=2, n_layer=2)),
}


@pytest.mark.parametrize("make", STOCK.values(), ids=STOCK)
def test_attention_of_transformers_has_its_weights_as_maps(make: Any) -> None:
    model = randomized(make())
    maps = attention_maps(model, IDS)
    assert (model.config._attn_implementation, [layer.kind for layer in maps.layers]) == ("sdpa", [SOFTMAX] * 2)
    assert not any(module._forward_hooks for module in model.modules())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS[None], output_attentions=True).attentions
    for layer, weights in zip(maps.layers, expected, strict=True):
        np.testing.assert_allclose(layer.average, weights[0].mean(0), rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(layer.mask, np.tri(7))
    heads = channel_maps(model, IDS, 1, slice(1, 2)).float()
    torch.testing.assert_close(heads, expected[1][0, 1:2], rtol=1e-5, atol=1e-7)
    assert np.abs(maps.layers[1].average - maps.layers[0].average).max() > 0.01


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("bamba", [(0, "Mamba-2"), (1, SOFTMAX), (2, "Mamba-2")]), ("falcon_h1", [(1, "Mamba-2"), (1, SOFTMAX)])],
)
def test_attention_stands_beside_the_scans_of_a_hybrid(model_type: str, layers: list[tuple[int, str]]) -> None:
    stock = tiny_model(model_type).eval()
    stock.set_attn_implementation("eager")
    maps = attention_maps(stateful(tiny_model(model_type)).eval(), IDS, layers=[layer for layer, _ in layers])
    assert [(layer.layer, layer.kind) for layer in maps.layers] == layers
    with torch.no_grad():
        expected = [weights for weights in stock(IDS[None], output_attentions=True).attentions if weights is not None]
    found = next(layer for layer in maps.layers if layer.kind == SOFTMAX)
    weights = expected[1 if len(expected) > 1 else 0][0].mean(0)
    np.testing.assert_allclose(found.average, weights, rtol=1e-4, atol=1e-6)
    assert (found.linear_distance, found.cosine) == (None, None)


def test_a_model_with_the_code_of_its_checkpoint(tmp_path: Path) -> None:
    ours = mamba2()
    ours.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        remote: Any = get_class_from_dynamic_module("modeling_stateful_mamba2.StatefulMamba2ForCausalLM", tmp_path)
    model = remote.from_pretrained(tmp_path)
    assert not isinstance(model, StatefulMamba2ForCausalLM)
    assert torch.equal(channel_maps(model, IDS, 1, ALL), channel_maps(ours, IDS, 1, ALL))


def test_smaller_steps_are_in_the_maps() -> None:
    whole, halved = (
        channel_maps(mamba(**fields), IDS, 0, ALL) for fields in ({}, {"forgetting": {"delta_scale": 0.5}})
    )
    diagonals = [maps.diagonal(dim1=1, dim2=2) for maps in (whole, halved)]
    torch.testing.assert_close(diagonals[1], diagonals[0] / 2)  # C_i . B_i Delta_i, without decay
