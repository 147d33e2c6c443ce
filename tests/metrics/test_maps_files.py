"""Files and figures of attention maps, correlations of projections, recordings of scans, and what is refused."""

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
from hf_recurrent_lengthgen.metrics.maps.figure import attention_maps_figure
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps, projection_correlations
from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps, LayerMaps, save_maps
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


def maps_of(layers: int, tokens: list[str], model: str = "m") -> AttentionMaps:
    rng, T = np.random.default_rng(0), len(tokens)
    made = []
    for layer in range(layers):
        average = np.tril(rng.normal(size=(T, T)) * 10.0 ** (layer - 2)).astype(np.float32)
        mask = np.tril(rng.uniform(size=(T, T))).astype(np.float32)
        numbers: Any = {"linear_distance": 0.5, "cosine": None if layer == 1 else 0.71, "identity": None}
        made.append(LayerMaps(layer=layer, kind="Mamba-2", average=average, mask=mask, **numbers))
    return AttentionMaps(model, "", tuple(tokens), tuple(made))


def test_each_layer_has_its_map_and_its_mask() -> None:
    maps = maps_of(6, list("abcde"))
    images = [axes for axes in attention_maps_figure(maps).axes if axes.get_visible() and axes.images]
    titles = ["Layer 0, Mamba-2\ncos(W_B, W_C) 0.71", "Layer 1, Mamba-2"]
    assert [title for axes in images if (title := axes.get_title(loc="left"))][:2] == titles
    for values in (array for layer in maps.layers for array in (layer.average, layer.mask)):
        shown = [axes.images[0].get_array() for axes in images]
        assert any(np.array_equal(image.filled(0), values) for image in shown)
        assert all(image.mask.tolist() == np.triu(np.ones((5, 5), dtype=bool), 1).tolist() for image in shown)


def test_models_stand_side_by_side_with_their_names() -> None:
    figure = attention_maps_figure(maps_of(1, list("ab"), "mimetic"), maps_of(2, list("ab"), "attention"))
    titles = [title for axes in figure.axes if axes.images and (title := axes.get_title(loc="left"))]
    assert [title.splitlines()[:2] for title in titles] == [
        ["mimetic", "Layer 0, Mamba-2"],
        ["attention", "Layer 0, Mamba-2"],
        ["attention", "Layer 1, Mamba-2"],
    ]
    assert figure.get_suptitle().startswith("attention maps (channel average)")


@pytest.mark.parametrize("least", [0, -0.25])
def test_scales_are_symmetric_for_maps_and_from_0_to_1_for_masks(least: float) -> None:
    maps = maps_of(3, list("abcd"))
    maps.layers[1].mask[3, 0] = least  # below 0 in the delta rule, then on one scale
    figure = attention_maps_figure(maps)
    for axes in figure.axes:
        if not axes.images:
            continue
        norm, values = axes.images[0].norm, axes.images[0].get_array()
        if axes.get_title(loc="left"):
            assert (norm.vmin, norm.vmax) == pytest.approx((-abs(values).max(), abs(values).max()))
            assert [float(norm(x * norm.vmax)) for x in (-1, -0.01, 0, 0.01, 1)] == pytest.approx(
                [0, 0.45, 0.5, 0.55, 1]
            )
        else:
            assert (norm.vmin, norm.vmax) == (least, 1)


def test_short_texts_are_written_at_the_axes_and_long_ones_counted() -> None:
    figure = attention_maps_figure(maps_of(1, ["a", " ", "\n", "$x", ""]))
    labels = [[text.get_text() for text in axes.get_yticklabels()] for axes in figure.axes if axes.images]
    assert labels[0] == ["a", "␣", "↵", "$x", "∅"]
    figure = attention_maps_figure(maps_of(1, ["a"] * 120))
    labels = [[text.get_text() for text in axes.get_yticklabels()] for axes in figure.axes if axes.images]
    assert labels[0] == ["0", "50", "100"]


def test_a_map_of_zeros_is_drawn() -> None:
    zeros = np.zeros((2, 2), dtype=np.float32)
    numbers: Any = dict.fromkeys(("linear_distance", "cosine", "identity"))
    layer = LayerMaps(layer=0, kind="Mamba-1", average=zeros, mask=zeros, **numbers)
    attention_maps_figure(AttentionMaps("m", "", ("a", "b"), (layer,))).draw_without_rendering()
