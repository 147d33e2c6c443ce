"""Write weights file by file, reading the tensors of a file only when it is written.

Tensors of memory-mapped files are written without a copy, so only transformed tensors of one file are in memory.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor


class Entry(NamedTuple):
    """One tensor to be written; `read` is called once, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> "Entry":
        return self._replace(dtype=dtype, read=lambda: self.read().to(dtype))


def write_safetensors(folder: Path, entries: Sequence[Entry], max_shard_size: str | int = "5GB") -> list[Path]:
    """Write model.safetensors, or several files in the order of entries with an index; returns the weight files.

    A tensor larger than `max_shard_size` gets its own file.
    """
    by_name = {entry.name: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda entry: entry.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _tensor(by_name[name]) for name in names}
        first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
        # safetensors refuses tensors that share memory, as those of pickles may
        save_file(
            {name: t if first[t.data_ptr()] == name else t.clone() for name, t in tensors.items()},
            folder / file,
            {"format": "pt"},
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [folder / file for file in split.filename_to_tensors]


def write_torch(path: Path, entries: Sequence[Entry], shared: Mapping[str, str] | None = None) -> None:
    """Write a file that `torch.load` reads as a dictionary of tensors, also with `mmap=True`.

    `shared` are further names of written tensors, which share their memory as tied weights do.
    """
    tensors = {entry.name: _tensor(entry) for entry in entries}
    tensors |= {name: tensors[other] for name, other in (shared or {}).items()}
    with path.open("wb") as file:
        torch.save(tensors, file)


def _tensor(entry: Entry) -> Tensor:
    """A tensor with its own storage, since the whole storage is written."""
    tensor = entry.read().detach().contiguous()
    assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
    return tensor if tensor.untyped_storage().nbytes() == entry.bytes else tensor.clone()
