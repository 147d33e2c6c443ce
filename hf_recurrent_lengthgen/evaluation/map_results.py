"""Attention maps of a recurrent model as values with a file form; pictures of them read only this."""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any
from zipfile import BadZipFile

import numpy as np

MAPS_FORMAT, MAPS_FORMAT_VERSION = "attention_maps", 1
_NO_MAPS = (
    AttributeError,
    BadZipFile,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    TypeError,
    ValueError,
    zlib.error,
)
"""What reading raises where a file is something else or damaged."""
_NUMBERS = ("layer", "kind", "cosine", "identity", "linear_distance")


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """What one layer mixes on one text, and how its projections are correlated (arXiv:2410.11135).

    Attributes:
        layer: Number of the layer, from 0.
        kind: "Mamba-1" (with FalconMamba), "Mamba-2", "gated linear attention", "linear attention" or
            "softmax attention".
        average: (T, T) float32, the mean of the maps M_d over the channels (section 2): entry (i, j) is the weight of
            token j in the output at token i, 0 for j > i.
        mask: (T, T) float32, the mean over channels and states of what is left at i of what was written at j: 1 where
            nothing is forgotten.
        linear_distance: ||average - L|| / ||L|| for the linear attention L = tril(C^T B) of Eq. 12, which has the same
            B and C, steps of 1 and no decay; None for softmax attention.
        cosine: Cosine of W_B and W_C as vectors; None where there are none.
        identity: Cosine of W_C^T W_B and the identity; None where there are none. It is at most sqrt(N / D).
    """

    layer: int
    kind: str
    average: np.ndarray
    mask: np.ndarray
    linear_distance: float | None
    cosine: float | None
    identity: float | None


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
    header = {
        "format": MAPS_FORMAT,
        "version": MAPS_FORMAT_VERSION,
        "model": maps.model,
        "tokens": maps.tokens,
        "layers": [
            {name: value for name, value in asdict(layer).items() if name in _NUMBERS} for layer in maps.layers
        ],
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                header=np.array(json.dumps(header)),
                average=np.stack([layer.average for layer in maps.layers]),
                mask=np.stack([layer.mask for layer in maps.layers]),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_maps(path: str | os.PathLike[str]) -> AttentionMaps:
    """Read what `save_maps` wrote.

    Raises:
        ValueError: for a file that is something else, cut off, or of a newer version.
    """
    try:
        with Path(path).open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            header: dict[str, Any] = dict(json.loads(str(file["header"])))
            average, mask = file["average"], file["mask"]
    except _NO_MAPS as error:
        raise ValueError(f"{os.fspath(path)} holds no attention maps ({error}).") from error
    if header.get("format") != MAPS_FORMAT or header.get("version") != MAPS_FORMAT_VERSION:
        raise ValueError(
            f"{os.fspath(path)} is of the format {header.get('format')!r}, version {header.get('version')!r}; this "
            f"code reads {MAPS_FORMAT!r}, version {MAPS_FORMAT_VERSION}."
        )
    try:
        layers = zip(map(_checked, header["layers"]), average, mask, strict=True)
        return AttentionMaps(
            _of_type(header["model"], str),
            tuple(_of_type(token, str) for token in _of_type(header["tokens"], list)),
            tuple(LayerMaps(average=first, mask=second, **numbers) for numbers, first, second in layers),
        )
    except _NO_MAPS as error:
        raise ValueError(f"{os.fspath(path)} holds damaged attention maps ({error!r}).") from error


def _checked(numbers: Any) -> dict[str, Any]:
    """What the header says of a layer."""
    for name, value in numbers.items():
        _of_type(value, {"layer": int, "kind": str}.get(name, (float, int, NoneType)))
    return dict(numbers)


def _of_type(value: Any, allowed: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise TypeError(f"{value!r} in the header")
    return value
