"""Attention maps of a recurrent model as values with a file form; pictures of them read only this."""

import json
import math
import os
from dataclasses import dataclass

import numpy as np

from hf_recurrent_lengthgen.models.atomic_files import replacing


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """What one layer mixes on one text, and how its projections are correlated (arXiv:2410.11135).

    Attributes:
        layer: Number of the layer, from 0.
        kind: "Mamba-1" (with FalconMamba), "Mamba-2", "gated linear attention", "linear attention" or
            "softmax attention".
        linear_distance: ||average - L|| / ||L|| for the linear attention L = tril(C^T B) of Eq. 12, which has the same
            B and C, steps of 1 and no decay; None for softmax attention.
        cosine: Cosine of W_B and W_C as vectors; None where there are none.
        identity: Cosine of W_C^T W_B and the identity, at most sqrt(N / D); None where there are none.
        average: (T, T) float32, the mean of the maps M_d over the channels (section 2): entry (i, j) is the weight of
            token j in the output at token i, 0 for j > i.
        mask: (T, T) float32, the mean over channels and states of what is left at i of what was written at j: 1 where
            nothing is forgotten.
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
    """The maps of some layers of a model on one text of T tokens, given as words."""

    model: str
    tokens: tuple[str, ...]
    layers: tuple[LayerMaps, ...]


def save_maps(path: str | os.PathLike[str], maps: AttentionMaps) -> None:
    """Write maps as an .npz file: `average` and `mask` (layers, T, T), and everything else as JSON in `header`, where
    a number that is not finite, as the cosine of weights that are 0, is null.
    """
    arrays = {name: np.stack([getattr(layer, name) for layer in maps.layers]) for name in ("average", "mask")}
    numbers = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(layer).items()
            if name not in arrays
        }
        for layer in maps.layers
    ]
    about = {"kind": "attention_maps", "schema_version": 1, "model": maps.model, "tokens": maps.tokens}
    header = json.dumps({**about, "layers": numbers}, allow_nan=False)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, header=np.array(header), average=arrays["average"], mask=arrays["mask"])
