"""Weights in all containers, and files that are broken in all ways."""

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_recurrent_lengthgen.checkpoints.conversion.tensor_writing import Entry, write_safetensors, write_torch
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles, same_bits

TENSORS = {
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "transposed": torch.randn(4, 6).T,
    "part of a larger one": torch.randn(8, 3)[2:5],
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.arange(7),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")]).half(),
}


def entries(tensors: dict[str, torch.Tensor] = TENSORS) -> list[Entry]:
    return [Entry(name, tuple(value.shape), value.dtype, lambda value=value: value) for name, value in tensors.items()]


def test_one_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
    for name in names:
        torch.save({name: torch.zeros(3)}, tmp_path / name, _use_new_zipfile_serialization=False)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    read: list[weakref.ref[torch.Tensor]] = []
    load = torch.load

    def watched(*arguments: Any, **options: Any) -> Any:
        assert not [tensor for tensor in read if tensor() is not None]
        tensors = load(*arguments, **options)
        read.extend(map(weakref.ref, tensors.values()))
        return tensors

    monkeypatch.setattr(torch, "load", watched)
    files = TensorFiles(tmp_path)
    assert len(read) == 3
    for name in names:
        files.tensor(name)
    assert len(read) == 6


def assert_holds(source: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    files = TensorFiles(source)
    assert set(files.metas) == tensors.keys()
    for name, value in tensors.items():
        assert files.metas[name] == (tuple(value.shape), value.dtype)
        assert same_bits(files.tensor(name), value), name


def sharded(folder: Path, container: str = "safetensors") -> Path:
    """Two files and an index, as Transformers and older versions of it write them."""
    stem, save = ("model", save_file) if container == "safetensors" else ("pytorch_model", torch.save)
    suffix = "safetensors" if container == "safetensors" else "bin"
    parts = {
        f"{stem}-00001-of-00002.{suffix}": {"a": torch.ones(2)},
        f"{stem}-00002-of-00002.{suffix}": {"b": torch.zeros(3)},
    }
    for file, values in parts.items():
        save(values, folder / file)  # type: ignore[operator]
    index = {"metadata": {}, "weight_map": {name: file for file, values in parts.items() for name in values}}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    assert write_safetensors(tmp_path, entries()) == [tmp_path / "model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(TENSORS)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert same_bits(value, TENSORS[name]), name
    assert_holds(tmp_path)


def test_shards_hold_what_the_index_says(tmp_path: Path) -> None:
    tensors = {f"layer {number}": torch.randn(10) for number in range(7)}
    paths = write_safetensors(tmp_path, entries(tensors), 100)
    assert [path.name for path in paths] == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 40
    for path in paths:
        assert {name for name, file in index["weight_map"].items() if file == path.name} == load_file(path).keys()
    assert_holds(tmp_path, tensors)


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_reads_what_is_written(mmap: bool, tmp_path: Path) -> None:
    write_torch(tmp_path / "pytorch_model.bin", entries(), {"again": "half"})
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True, mmap=mmap)
    assert list(loaded) == [*TENSORS, "again"]
    for name, value in TENSORS.items():
        assert same_bits(loaded[name], value), name
        assert loaded[name].is_contiguous()
    assert loaded["again"].data_ptr() == loaded["half"].data_ptr()
    assert_holds(tmp_path, TENSORS | {"again": TENSORS["half"]})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "RWKV.pth"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_what_torch_wrote_is_read(name: str, zipped: bool, tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / name, _use_new_zipfile_serialization=zipped)
    assert_holds(tmp_path)
    assert_holds(tmp_path / name)


@pytest.mark.parametrize("container", ["safetensors", "torch"])
def test_shards_of_others_are_read(container: str, tmp_path: Path) -> None:
    assert_holds(sharded(tmp_path, container), {"a": torch.ones(2), "b": torch.zeros(3)})


class RunsCode:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def write_malicious(folder: Path) -> None:
    torch.save({"a": torch.ones(1), "b": RunsCode(folder / "ran")}, folder / "pytorch_model.bin")


def write_truncated(name: str, **options: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        save_file({"a": torch.ones(100)}, path) if name.endswith("safetensors") else torch.save(
            {"a": torch.ones(100)}, path, **options
        )
        path.write_bytes(path.read_bytes()[:-200])

    return write


def write_index(**more: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = sharded(folder) / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"] | more}))

    return write


def remove_shard(folder: Path) -> None:
    (sharded(folder) / "model-00002-of-00002.safetensors").unlink()


def add_to_both_shards(folder: Path) -> None:
    sharded(folder)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")


def write_file(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def save(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle that runs code": (
        write_malicious,
        "was not opened: it is damaged, no pickle of torch, or would run code .*convert it to",
    ),
    "truncated safetensors": (write_truncated("model.safetensors"), r"model\.safetensors is damaged"),
    "truncated zip": (write_truncated("pytorch_model.bin"), r"pytorch_model\.bin was not opened: it is damaged"),
    "truncated old pickle": (
        write_truncated("pytorch_model.bin", _use_new_zipfile_serialization=False),
        r"pytorch_model\.bin was not opened: it is damaged",
    ),
    "not weights": (write_file("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "is damaged"),
    "a list": (save([torch.ones(1)]), "must hold tensors by name, and holds .'': 'list'"),
    "nested": (save({"model": {"a": torch.ones(1)}}), "holds .'model': 'dict'"),
    "a shard that is missing": (remove_shard, "not beside it .model-00002-of-00002.safetensors.: copy or download"),
    "an index that leads outside": (write_index(a="../model-00001-of-00002.safetensors"), "not beside it"),
    "a tensor in two files": (add_to_both_shards, "both hold a"),
    "an index that is no JSON": (write_file("model.safetensors.index.json", b"{"), "index.json is damaged"),
    "nothing": (lambda folder: None, "holds no weights"),
    "several .pth files": (
        lambda folder: [torch.save({}, folder / name) for name in ("a.pth", "b.pth")],
        r"several .pth files \(a.pth, b.pth\): give",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name: str, tmp_path: Path) -> None:
    write, message = BROKEN[name]
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_tensors_that_share_their_bytes_are_written(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    entries = [Entry(name, tuple(x.shape), x.dtype, lambda x=x: x) for name, x in (("a", whole), ("b", whole))]
    write_safetensors(tmp_path, entries, "5GB")
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["a"], whole)
    assert torch.equal(written["b"], whole)
