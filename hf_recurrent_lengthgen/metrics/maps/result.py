"""Attention maps of a recurrent model as values with a file form, which figures are made from."""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hf_recurrent_lengthgen.evaluation.json_schema import document, from_json, to_json
from hf_recurrent_lengthgen.evaluation.results import DataRecord
from hf_recurrent_lengthgen.models.state_on_disk import replacing


@dataclass(frozen=True, eq=False)
class LayerNumbers:
    """The numbers of one layer on one text, and the correlation of its projections (Trockman et al., 2024).

    Attributes:
        layer: Number of the layer, from 0.
        kind: "Mamba-1" (with FalconMamba), "Mamba-2", "gated linear attention", "linear attention",
            "delta rule" or "softmax attention".
        linear_distance: ||average - L|| / ||L|| for the linear attention L = tril(C^T B) of Eq. 12, which has the same
            B and C, steps of 1, no decay and no erasure; None for softmax attention.
        cosine: Cosine of W_B and W_C as vectors; None for a layer without them.
        identity: Cosine of W_C^T W_B and the identity, at most sqrt(N / D); None for a layer without them.
    """

    layer: int
    kind: str
    linear_distance: float | None
    cosine: float | None
    identity: float | None


@dataclass(frozen=True, eq=False)
class LayerMaps(LayerNumbers):
    """The numbers of a layer, and its maps.

    Attributes:
        average: (T, T) float32, the mean of the maps M_d over the channels (section 2): entry (i, j) is the weight of
            token j in the output at token i, 0 for j > i.
        mask: (T, T) float32, the share that is left at i of what was written at j, mean over channels and states: 1 if
            nothing is forgotten. For the delta rule, the share that the key of j still reads at i.
    """

    average: np.ndarray
    mask: np.ndarray


@document("attention_maps", version=2)
@dataclass(frozen=True, eq=False)
class MapsRecord:
    """What was found in some layers of a model on one text of T tokens, but for the maps.

    Attributes:
        weights: SHA-256 of the model's parameters.
        data: Where the text is from; the digest is that of its token ids.
        tokens: The T tokens as words.
    """

    model: str
    weights: str
    data: DataRecord
    tokens: tuple[str, ...]
    layers: tuple[LayerNumbers, ...]
    device: str
    versions: dict[str, str]
    command: str
    wall_seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMaps(MapsRecord):
    """The same with the maps of the layers."""

    layers: tuple[LayerMaps, ...]


def save_maps(path: str | os.PathLike[str], maps: AttentionMaps) -> None:
    """Write maps as an .npz file: `average` and `mask` (layers, T, T), and their `MapsRecord` as JSON in `header`.

    A number that is not finite, such as the cosine of zero weights, is null there.
    """
    arrays = {name: np.stack([getattr(layer, name) for layer in maps.layers]) for name in ("average", "mask")}
    numbers = tuple(
        LayerNumbers(*(_finite(getattr(layer, field.name)) for field in fields(LayerNumbers))) for layer in maps.layers
    )
    header = to_json(MapsRecord(**vars(maps) | {"layers": numbers}))
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, header=np.array(header), average=arrays["average"], mask=arrays["mask"])


def read_maps(path: str | os.PathLike[str]) -> AttentionMaps:
    """Read what `save_maps` wrote; a `ValueError` names the file and what is wrong in it."""
    try:
        with Path(path).open("rb") as raw, np.load(raw) as file:
            record = from_json(str(file["header"]), MapsRecord)
            shape = (len(record.layers), len(record.tokens), len(record.tokens))
            average, mask = file["average"], file["mask"]
        if not average.shape == mask.shape == shape:
            raise ValueError(f"The arrays have the shapes {average.shape} and {mask.shape}, but must have {shape}.")
    except (BadZipFile, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    layers = zip(record.layers, average, mask, strict=True)
    made = tuple(LayerMaps(**vars(layer), average=one, mask=other) for layer, one, other in layers)
    return AttentionMaps(**vars(record) | {"layers": made})


def _finite(value: float | str | None) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
