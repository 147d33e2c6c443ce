"""Attention maps of a recurrent model as values, which figures are made from, and as a file."""

import json
import math
import os
from dataclasses import dataclass

import numpy as np

from hf_recurrent_lengthgen.models.state_on_disk import replacing


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The maps of one layer on one text of T tokens, and the correlation of its projections (Trockman et al., 2024).

    Attributes:
        layer: Number of the layer, from 0.
        kind: "Mamba-1" (with FalconMamba), "Mamba-2", "gated linear attention", "linear attention",
            "delta rule" or "softmax attention".
        linear_distance: ||average - L|| / ||L|| for the linear attention L = tril(C^T B) of Eq. 12, which has the same
            B and C, steps of 1, no decay and no erasure; None for softmax attention.
        cosine: Cosine of W_B and W_C as vectors; None for a layer without them.
        identity: Cosine of W_C^T W_B and the identity, at most sqrt(N / D); None for a layer without them.
        average: (T, T) float32, the mean of the maps M_d over the channels (section 2) or heads: entry (i, j) is the
            weight of token j in the output at token i, 0 for j > i.
        mask: (T, T) float32, the share that is left at i of what was written at j, mean over channels and states: 1 if
            nothing is forgotten. For the delta rule, the share that the key of j still reads at i.
    """

    layer: int
    kind: str
    linear_distance: float | None
    cosine: float | None
    identity: float | None
    average: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of some layers of a model with parameters of the SHA-256 `weights`, and the T tokens as words."""

    model: str
    weights: str
    tokens: tuple[str, ...]
    layers: tuple[LayerMaps, ...]


def save_maps(path: str | os.PathLike[str], maps: AttentionMaps) -> None:
    """Write maps as an .npz file: `average` and `mask` (layers, T, T), and all else as JSON in `header`.

    A number that is not finite, such as the cosine of zero weights, is null there.
    """
    arrays = {name: np.stack([getattr(layer, name) for layer in maps.layers]) for name in ("average", "mask")}
    numbers = [
        {name: _plain(value) for name, value in vars(layer).items() if name not in arrays} for layer in maps.layers
    ]
    header = json.dumps(vars(maps) | {"layers": numbers})
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, header=np.array(header), average=arrays["average"], mask=arrays["mask"])


def _plain(value: float | str | None) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
