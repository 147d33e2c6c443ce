"""Files of attention maps, correlations of projections, recordings of scans, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.evaluation.recorded_scans import recorded_scans
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps, projection_correlations
from hf_recurrent_lengthgen.metrics.maps.result import save_maps
from hf_recurrent_lengthgen.models import StatefulRWKV6Config, StatefulRWKV6ForCausalLM
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from tests.metrics.test_maps import IDS, SIZES, gla, mamba, mamba2


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
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=32))
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


def rwkv6() -> Any:
    return StatefulRWKV6ForCausalLM(StatefulRWKV6Config(**SIZES, num_heads=2, intermediate_size=8))


@pytest.mark.parametrize(
    ("make", "arguments", "complaint"),
    [
        (mamba, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, r"one text, \(T,\) or \(1, T\), got \(2, 3\)"),
        (mamba, {"layers": [2]}, r"some of 0 to 1, got \[2\]"),
        (mamba, {"layers": []}, "some of 0 to 1"),
        (lambda: mamba2(forgetting={"window": 3}), {}, "switch forgetting off"),
        (rwkv6, {}, r"layers \[0, 1\] of StatefulRWKV6ForCausalLM have no attention maps"),
        (lambda: MambaForCausalLM(MambaConfig(**SIZES)), {}, "MambaForCausalLM are not known to this package"),
    ],
)
def test_what_has_no_maps_is_refused(make: Any, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        attention_maps(make(), **({"input_ids": IDS} | arguments))
