"""Attention maps of the delta rule equal products of matrices from the papers' equations."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps
from hf_recurrent_lengthgen.models import (
    StatefulDeltaNetConfig,
    StatefulDeltaNetForCausalLM,
    StatefulGatedDeltaNetConfig,
    StatefulGatedDeltaNetForCausalLM,
    StatefulKDAConfig,
    StatefulKDAForCausalLM,
    StatefulRWKV7Config,
    StatefulRWKV7ForCausalLM,
)
from tests.metrics.test_maps import ALL, IDS, SIZES, channel_maps, randomized, seen


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


def test_a_key_of_zeros_writes_and_keeps_nothing() -> None:
    model = delta_rule("DeltaNet")
    with torch.no_grad():
        model.model.layers[1].attn.k_proj.weight.zero_()
    layer = attention_maps(model, IDS).layers[1]
    assert not layer.average.any()
    assert not layer.mask.any()
