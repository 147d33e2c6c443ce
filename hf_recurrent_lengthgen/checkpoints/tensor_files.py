"""The weights of a checkpoint, read tensor by tensor from any kind of file.

`TensorFiles` memory-maps its files and keeps one open at a time, so reading all tensors needs the memory of one file
and one tensor. `tensor_writing.py` is the other direction.
"""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.records import AGAIN, read_json_object

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of weight files, in the order in which Transformers looks for them; a single .pth file comes last."""

DTYPES = {
    **{f"F{8 * dtype.itemsize}": dtype for dtype in (torch.float64, torch.float32, torch.float16)},
    **{f"I{8 * dtype.itemsize}": dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)},
    **{"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
"""Dtypes by their names in safetensors files."""

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes to which weights can be converted."""


class Meta(NamedTuple):
    """Shape and dtype of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_OpenFile = tuple[dict[str, Meta], Callable[[str], Tensor]]
"""Shape and dtype of each tensor of a file, and the function that reads one."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and bytes, including NaN and the sign of zero."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


class TensorFiles:
    """Weights of a checkpoint: one or several .safetensors, .bin or .pth files.

    Args:
        source: Checkpoint folder, or one file. Pickles of `torch.save` are read with `weights_only=True`.

    Attributes:
        paths: The weight files.
        metas: Shape and dtype of each tensor, in the order of the files.

    Raises:
        ValueError: without weights, and for files that are damaged, missing, outside the folder, or hold anything but
            named tensors.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        path = _weight_file(Path(source))
        self.paths = _indexed(path) if path.name.endswith(".index.json") else (path,)
        self.metas: dict[str, Meta] = {}
        self._files: dict[str, Path] = {}
        self._opened: tuple[Path, _OpenFile] | None = None
        for file in self.paths:
            metas = self._open(file)[0]  # no reference to the file outlives this
            if twice := sorted(self.metas.keys() & metas.keys()):
                raise ValueError(f"{file} and files before it both hold {', '.join(twice)}: {AGAIN}.")
            self.metas |= metas
            self._files |= dict.fromkeys(metas, file)
        self.close()

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU. It may be a view of the mapped file, for weights larger than memory: do not write to
        either."""
        return self._open(self._files[name])[1](name)

    def close(self) -> None:
        """Unmap the open file."""
        self._opened = None

    def _open(self, path: Path) -> _OpenFile:
        if self._opened is None or self._opened[0] != path:
            self._opened = None  # unmapped before the next file is mapped
            self._opened = (path, (_safetensors if path.suffix == ".safetensors" else _pickled)(path))
        return self._opened[1]


def _weight_file(source: Path) -> Path:
    """The index of the weights, or the only file."""
    if source.is_file():
        return source
    for name in WEIGHT_FILES:
        if (source / name).is_file():
            return source / name
    single = sorted(source.glob("*.pth"))
    if len(single) != 1:
        several = f"several .pth files ({', '.join(path.name for path in single)})"
        what = several if single else f"no weights ({', '.join(WEIGHT_FILES)}, *.pth)"
        raise ValueError(f"{source} holds {what}: give a checkpoint folder, or the path of one weight file.")
    return single[0]


def _indexed(index: Path) -> tuple[Path, ...]:
    """The files that an index names, which must be beside it."""
    names = sorted({str(name) for name in read_json_object(index).get("weight_map", {}).values()})
    missing = [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]
    if missing or not names:
        raise ValueError(f"{index} names files that are not beside it ({', '.join(missing)}): {AGAIN}.")
    return tuple(index.parent / name for name in names)


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, Meta]:
    """Shape and dtype of each tensor of one .safetensors file, under its name in the file. Errors as `TensorFiles`."""
    return _safetensors(Path(path))[0]


def _safetensors(path: Path) -> _OpenFile:
    try:
        file = safe_open(path, framework="pt")
        parts = {name: file.get_slice(name) for name in file.keys()}
        metas = {name: Meta(tuple(part.get_shape()), DTYPES[part.get_dtype()]) for name, part in parts.items()}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is damaged, or of an unknown dtype ({error}): {AGAIN}.") from error
    return metas, file.get_tensor


def _pickled(path: Path) -> _OpenFile:
    mappable = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip archives
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} was not opened: it is damaged, no pickle of torch, or would run code "
            f"({str(error).partition(chr(10))[0]}). Do not use it; if you trust it, convert it to safetensors."
        ) from error
    named = value if isinstance(value, dict) else {"": value}
    if wrong := {name: type(part).__name__ for name, part in named.items() if not isinstance(part, Tensor)}:
        raise ValueError(f"{path} must hold tensors by name, and holds {wrong}.")
    metas = {name: Meta(tuple(part.shape), part.dtype) for name, part in named.items()}
    return metas, lambda name: named[name].detach()
