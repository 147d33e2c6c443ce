"""The weights of a checkpoint, read tensor by tensor from any kind of file.

`TensorFiles` memory-maps its files and keeps one open at a time, so reading all tensors needs the memory of one file
and one tensor. `tensor_writing.py` is the other direction.
"""

import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors files."""

ROOTS = ("backbone.", "blocks.", "model.", "module.")
"""How the names of a whole model may begin."""
COMPILED = "_orig_mod."
"""In the names of the parameters of a module that `torch.compile` wraps."""

GGML = {b"fmgg": "ggml", b"lmgg": "ggml", b"tjgg": "ggml", b"GGUF": "GGUF"}
"""First bytes of files of rwkv.cpp and llama.cpp (0x67676d66 and others), and what they are called."""

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes to which weights can be converted."""


class Meta(NamedTuple):
    """Shape and dtype of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and bytes, including NaN and the sign of zero."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


class TensorFiles:
    """Weights of a checkpoint: one or several .safetensors, .bin or .pth files.

    Args:
        source: Checkpoint folder, or one file.

    Attributes:
        container: "safetensors", or "torch" for pickles of `torch.save`, which are read with `weights_only=True`.
        paths: The weight files.
        index: The index that lists them; None for a single file.
        metas: Shape and dtype of each tensor, in the order of the files. What `torch.compile` puts into names
            (`_orig_mod.`) is left out of them.

    Raises:
        ValueError: without weights, and for files that are damaged, contradict their index, are outside the folder, or
            hold anything but named tensors.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        path, self.index = _weight_file(Path(source)), None
        if path.name.endswith(".index.json"):
            self.index = path
        self.container: Literal["safetensors", "torch"] = "safetensors" if ".safetensors" in path.name else "torch"
        named = {} if self.index is None else _read_index(self.index)
        self.paths = tuple(sorted({path.parent / name for name in named.values()})) if self.index else (path,)
        if missing := [file.name for file in self.paths if not file.is_file()]:
            raise ValueError(f"{path} names files that do not exist: {', '.join(missing)}. {AGAIN.capitalize()}.")
        self._stored: dict[str, tuple[Path, str]] = {}
        self.metas: dict[str, Meta] = {}
        self._opened: tuple[Path, _Safetensors | _Pickled] | None = None
        for file in self.paths:
            stored = self._open(file).metas
            metas = {name.replace(COMPILED, ""): meta for name, meta in stored.items()}
            if len(metas) < len(stored):
                raise ValueError(f"{file} holds tensors twice, with and without {COMPILED} in their names: {AGAIN}.")
            if twice := sorted(self.metas.keys() & metas.keys()):
                raise ValueError(f"{file} and files before it both hold {', '.join(twice)}: {AGAIN}.")
            self.metas |= metas
            self._stored |= {plain: (file, name) for plain, name in zip(metas, stored, strict=True)}
        if self.index is not None:
            _check_index(self.index, named, {name: file.name for file, name in self._stored.values()})
        prefix = _wrapper(self.metas)
        self.metas = {name.removeprefix(prefix): meta for name, meta in self.metas.items()}
        self._stored = {name.removeprefix(prefix): place for name, place in self._stored.items()}
        self.close()

    def keys(self) -> list[str]:
        return list(self.metas)

    def __contains__(self, name: str) -> bool:
        return name in self.metas

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU. It may be a view of the mapped file, for weights larger than memory: do not write to
        either."""
        file, stored = self._stored[name]
        return self._open(file).tensor(stored)

    def close(self) -> None:
        """Unmap the open file; reading opens it again."""
        self._opened = None

    def _open(self, path: Path) -> "_Safetensors | _Pickled":
        if self._opened is None or self._opened[0] != path:
            self._opened = None  # unmapped before the next file is mapped
            self._opened = (path, (_Safetensors if self.container == "safetensors" else _Pickled)(path))
        return self._opened[1]


def _wrapper(names: Iterable[str]) -> str:
    """What classes around a model, of training scripts and DistributedDataParallel, put before all names."""
    prefix, rest = "", list(names)
    while rest:
        wrapper = rest[0].partition(".")[0] + "."
        inner = [name.removeprefix(wrapper) for name in rest]
        if wrapper not in ("model.", "module.") or not all(name.startswith(wrapper) for name in rest):
            break
        if wrapper == "model." and not any(name.startswith(ROOTS) for name in inner):
            break  # the layers of a model without head
        prefix, rest = prefix + wrapper, inner
    return prefix


def _weight_file(source: Path) -> Path:
    """The index of the weights, or the only file."""
    if source.is_file():
        if not source.name.endswith((".safetensors", ".bin", ".pth", ".pt", ".index.json")):
            raise ValueError(f"{source} is no weight file: give a folder, or a .safetensors, .bin, .pth or .pt file.")
        return source
    if not source.is_dir():
        raise ValueError(f"{source} does not exist: give a checkpoint folder, or one weight file.")
    for name in WEIGHT_FILES:
        if (source / name).is_file():
            return source / name
    single = sorted(source.glob("*.pth"))
    if len(single) > 1:
        raise ValueError(
            f"{source} holds several .pth files ({', '.join(path.name for path in single)}): give the path of one."
        )
    if not single:
        raise ValueError(f"{source} holds no weights: there is none of {', '.join(WEIGHT_FILES)}, *.pth.")
    return single[0]


def _read_index(path: Path) -> dict[str, str]:
    """From tensors to file names, all in this folder and of one kind."""
    named = read_json_object(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ValueError(f"{path} must hold a weight_map from tensors to files: {AGAIN}.")
    suffix = Path(path.name.removesuffix(".index.json")).suffix
    plain = all(
        isinstance(name, str) and name.endswith(suffix) and not name.startswith(".") and not set(name) & set("/\\:\0")
        for name in named.values()
    )
    if not plain:
        bad = sorted({repr(name) for name in named.values()})
        raise ValueError(
            f"{path} must name *{suffix} files in its own folder only, got {', '.join(bad[:5])}: do not use it."
        )
    return named


def _check_index(path: Path, named: Mapping[str, str], found: Mapping[str, str]) -> None:
    problems = {
        "in the index, but in no file": sorted(named.keys() - found.keys()),
        "in a file, but not in the index": sorted(found.keys() - named.keys()),
        "in another file than the index says": sorted(
            name for name in named.keys() & found.keys() if named[name] != found[name]
        ),
    }
    if any(problems.values()):
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
        raise ValueError(f"{path} does not fit its files, {told}. {AGAIN.capitalize()}.")


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, Meta]:
    """Shape and dtype of each tensor of one .safetensors file, under its name in the file. Errors as `TensorFiles`."""
    return _Safetensors(Path(path)).metas


class _Safetensors:
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
            self.metas = {}
            for name in self._file.keys():
                part = self._file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{path} holds {name} as {part.get_dtype()}, which is none of {', '.join(DTYPES)}."
                    )
                self.metas[name] = Meta(tuple(part.get_shape()), DTYPES[part.get_dtype()])
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): {AGAIN}.") from error

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _Pickled:
    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            begins = file.read(4)
        if begins in GGML:
            raise ValueError(
                f"{path} is a {GGML[begins]} file, of rwkv.cpp or llama.cpp, which cannot be converted: give the "
                ".pth or .safetensors file that it was made from."
            )
        mappable = begins == b"PK\x03\x04"
        try:
            # A file of torch before 1.6 is no zip archive and cannot be mapped, so it is read as a whole.
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{path} was not opened: it is damaged, or would run code ({reason}). Do not use it; if you trust it, "
                "convert its weights to safetensors."
            ) from error
        except (RuntimeError, EOFError, KeyError, ValueError, AttributeError, TypeError, IndexError) as error:
            raise ValueError(f"{path} is damaged ({str(error).partition(chr(10))[0]}): {AGAIN}.") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path} must hold tensors by name, got {type(value).__name__}.")
        for name, part in value.items():
            plain = isinstance(part, Tensor) and part.layout == torch.strided and part.device.type == "cpu"
            if not isinstance(name, str) or not plain or part.dtype not in DTYPES.values():
                raise ValueError(f"{path} must hold tensors by name, but {name!r} is {_described(part)}.")
        self._tensors: dict[str, Tensor] = value
        self.metas = {name: Meta(tuple(part.shape), part.dtype) for name, part in value.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()


def _described(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"a {str(part.layout).removeprefix('torch.')} tensor of {part.dtype} on {part.device}"
    return f"a {type(part).__name__}"
