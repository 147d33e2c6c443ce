from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen.metrics.maps.figure import attention_maps_figure
from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps, LayerMaps


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
