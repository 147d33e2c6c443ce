"""Weights written tensor by tensor: memory is that of one tensor, whatever the size of the checkpoint.

The writers of safetensors and torch take all tensors of a file at once. A safetensors file is an 8-byte length, a JSON
header and the bytes; one of `torch.save` is a zip archive of a pickle and one record of bytes for each tensor.
"""

import io
import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hf_recurrent_lengthgen.conversion.dtypes import DTYPES

SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Entry(NamedTuple):
    """One tensor to be written; `read` is called when its turn comes, once."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parse_size(size: str | int) -> int:
    """Bytes of "5GB", "200MB" or a number, as in Transformers (powers of 1000).

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+) *([KMGT]B|)", str(size).strip().upper())
    if match is None or int(match[1]) < 1:
        raise ValueError(f'max_shard_size must be like "5GB", "200MB" or a number of bytes, got {size!r}.')
    return int(match[1]) * SIZE_UNITS[match[2]]


def write_safetensors(folder: Path, entries: Sequence[Entry], max_shard_size: str | int = "5GB") -> list[Path]:
    """Write model.safetensors, or several files and their index, as `save_pretrained` names them.

    Args:
        folder: Where there is no such file yet.
        entries: In the order of shards; within a file, wider dtypes come first, so that all tensors are aligned.
        max_shard_size: Bytes of tensors in a file; a larger tensor gets a file of its own.

    Returns:
        The files of weights.
    """
    shards = _shards(entries, parse_size(max_shard_size))
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    with _progress(entries) as written:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder / name, shard, written)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.bytes for entry in entries)},
            "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
        }
        _write_all(folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])
    return [folder / name for name in names]


def write_torch(path: Path, entries: Sequence[Entry], shared: Mapping[str, str] | None = None) -> None:
    """Write a file that `torch.load` reads as a dictionary of tensors, also with `mmap=True`.

    Args:
        path: The file.
        entries: In their order in the dictionary.
        shared: Further names at the end of the dictionary, for tensors that are there: they share their bytes, as
            tied weights do.
    """
    stored = {
        entry.name: _Storage(str(number), entry.dtype, torch.Size(entry.shape).numel())
        for number, entry in enumerate(entries)
    }
    tensors = {entry.name: _Stored(stored[entry.name], entry.shape) for entry in entries}
    tensors |= {name: tensors[other] for name, other in (shared or {}).items()}
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(tensors)
    with open(path, "xb") as file:
        output = _Output(file)
        # torch.save writes through the same class, but takes all tensors at once.
        archive: Any = torch._C.PyTorchFileWriter(output)  # type: ignore[call-overload]
        archive.write_record("data.pkl", buffer.getvalue(), len(buffer.getvalue()))
        archive.write_record("byteorder", sys.byteorder, len(sys.byteorder))
        with _progress(entries) as written:
            for number, entry in enumerate(entries):
                data = _bytes_of(entry)
                if data.untyped_storage().nbytes() != data.numel():
                    data = data.clone()  # for a record is the beginning of a storage
                archive.write_record(f"data/{number}", data.untyped_storage(), data.numel())
                output.check()
                written(data.numel())
                del data
        archive.write_end_of_file()
        output.check()
        file.flush()
        os.fsync(file.fileno())


class _Output:
    """A file for torch's writer, whose destructor ends the process if a write fails: errors are kept for `check`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: BaseException | None = None

    def write(self, data: Any) -> int:
        """All of it, or after an error nothing."""
        if self._error is None:
            try:
                self._file.write(data)
            except BaseException as error:  # an interrupt, too
                self._error = error
        return len(data)

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error


@contextmanager
def _progress(entries: Sequence[Entry]) -> Iterator[Callable[[int], Any]]:
    """A bar on a terminal."""
    total = sum(entry.bytes for entry in entries)
    with tqdm(total=total, desc="writing", unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


def _shards(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _write_shard(path: Path, entries: list[Entry], written: Callable[[int], Any]) -> None:
    entries.sort(key=lambda entry: -entry.dtype.itemsize)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": codes[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes

    def pieces() -> Iterator[Any]:
        yield struct.pack("<Q", len(text)) + text
        for entry in entries:
            data = _bytes_of(entry)
            yield data.numpy().data
            written(data.numel())
            del data

    _write_all(path, pieces())


def _write_all(path: Path, pieces: Any) -> None:
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(entry: Entry) -> Tensor:
    """All bytes of a tensor, (n,), uint8."""
    tensor = entry.read()
    assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Storage(NamedTuple):
    """What the pickle calls the record of one tensor."""

    key: str
    dtype: torch.dtype
    elements: int


class _Stored:
    """Pickled as a contiguous tensor on a `_Storage`."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
        self.storage, self.shape = storage, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.storage, 0, self.shape, strides, False, {})


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[value.dtype])
        return "storage", kind, value.key, "cpu", value.elements
