"""Attention maps of a recurrent model as values with a file form; pictures of them read only this."""

import os
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from hf_recurrent_lengthgen.evaluation.json_schema import document, from_json, to_json
from hf_recurrent_lengthgen.models.atomic_files import replacing

_NO_MAPS = (
    *(AttributeError, BadZipFile, EOFError, IndexError, KeyError, NotImplementedError, TypeError, ValueError),
    zlib.error,
)
"""What reading raises where a file is something else or damaged."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNumbers:
    """What one layer is, and how its projections are correlated (arXiv:2410.11135).

    Attributes:
        layer: Number of the layer, from 0.
        kind: "Mamba-1" (with FalconMamba), "Mamba-2", "gated linear attention", "linear attention" or
            "softmax attention".
        linear_distance: ||average - L|| / ||L|| for the linear attention L = tril(C^T B) of Eq. 12, which has the same
            B and C, steps of 1 and no decay; None for softmax attention.
        cosine: Cosine of W_B and W_C as vectors; None where there are none.
        identity: Cosine of W_C^T W_B and the identity; None where there are none. It is at most sqrt(N / D).
    """

    layer: int
    kind: str
    linear_distance: float | None
    cosine: float | None
    identity: float | None


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerMaps(LayerNumbers):
    """What one layer mixes on one text.

    Attributes:
        average: (T, T) float32, the mean of the maps M_d over the channels (section 2): entry (i, j) is the weight of
            token j in the output at token i, 0 for j > i.
        mask: (T, T) float32, the mean over channels and states of what is left at i of what was written at j: 1 where
            nothing is forgotten.
    """

    average: np.ndarray
    mask: np.ndarray


@document("attention_maps")
@dataclass(frozen=True)
class _Header:
    """All of `AttentionMaps` but the arrays."""

    model: str
    tokens: tuple[str, ...]
    layers: tuple[LayerNumbers, ...]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of some layers of a model on one text of T tokens, given as words."""

    model: str
    tokens: tuple[str, ...]
    layers: tuple[LayerMaps, ...]

    def __post_init__(self) -> None:
        size = (len(self.tokens),) * 2
        if not self.layers or not self.tokens:
            raise ValueError("Attention maps need at least one layer and one token.")
        for layer in self.layers:
            if layer.average.shape != size or layer.mask.shape != size:
                raise ValueError(
                    f"The maps of layer {layer.layer} have the shapes {layer.average.shape} and {layer.mask.shape}, "
                    f"but there are {size[0]} tokens."
                )


def save_maps(path: str | os.PathLike[str], maps: AttentionMaps) -> None:
    """Write maps as an .npz file: `average` and `mask` (layers, T, T), and everything else as JSON in `header`.

    The file is the old one, if there was one, or the whole new one.
    """
    names = [field.name for field in fields(LayerNumbers)]
    numbers = tuple(LayerNumbers(**{name: getattr(layer, name) for name in names}) for layer in maps.layers)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            header=np.array(to_json(_Header(maps.model, maps.tokens, numbers))),
            average=np.stack([layer.average for layer in maps.layers]),
            mask=np.stack([layer.mask for layer in maps.layers]),
        )


def load_maps(path: str | os.PathLike[str]) -> AttentionMaps:
    """Read what `save_maps` wrote.

    Raises:
        ValueError: for a file that is something else, cut off, or of a newer version.
    """
    try:
        with Path(path).open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            header = from_json(str(file["header"]), _Header)
            arrays = zip(header.layers, file["average"], file["mask"], strict=True)
            layers = tuple(LayerMaps(**asdict(numbers), average=one, mask=other) for numbers, one, other in arrays)
        return AttentionMaps(header.model, header.tokens, layers)
    except _NO_MAPS as error:
        raise ValueError(f"{os.fspath(path)} holds no attention maps ({error}).") from error
