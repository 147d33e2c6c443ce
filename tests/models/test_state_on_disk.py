"""A file is the old one or the new one; any damaged bit is found; what was loaded does not depend on its file."""

import contextlib
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_recurrent_lengthgen.models.state_on_disk import (
    digest_of,
    load_state,
    read_tensors,
    replacing,
    save_state,
    write_tensors,
)
from hf_recurrent_lengthgen.models.state_value import LayerState
from hf_recurrent_lengthgen.state_files import load_text_state, read_text, save_text_state
from tests.models.families import MAMBA2, build, random_tokens

Load = Callable[[Path], Any]


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def written(kind: str, path: Path) -> tuple[Load, list[torch.Tensor]]:
    """Write a file of a kind; how to load its tensors, and what they are."""
    if kind == "state":
        state = (LayerState(torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 0)),)
        save_state(path, state, {"ü": "é"})
        return (lambda path: list(load_state(path)[0][0])), list(state[0])
    model = build(MAMBA2).eval()
    text_state = read_text(model, random_tokens(1, 9))
    save_text_state(path, text_state)
    expected = [part for layer in text_state.state for part in layer]
    return (lambda path: [part for layer in load_text_state(path).state for part in layer]), expected


@pytest.mark.parametrize(
    ("kind", "step"), [("state", 29), ("text_state", 409), pytest.param("state", 1, marks=pytest.mark.slow)]
)
def test_each_flipped_bit_is_found(kind: str, step: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    load, expected = written(kind, path)
    content = path.read_bytes()
    assert all(torch.equal(a, b) for a, b in zip(load(path), expected, strict=True))
    silent = []
    for bit in range(0, 8 * len(content), step):
        path.write_bytes(flipped(content, bit))
        with contextlib.suppress(ValueError):
            load(path)
            silent.append(bit)
    assert not silent


@pytest.mark.parametrize("kind", ["state", "text_state"])
def test_what_was_loaded_does_not_depend_on_its_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    load, expected = written(kind, path)
    loaded = load(path)
    with open(path, "r+b") as file:  # in place, as a copy onto it does
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))
    os.truncate(path, 0)
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


@pytest.mark.parametrize("kind", ["state", "text_state"])
def test_a_file_without_a_checksum_is_read_and_reported(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    load, expected = written(kind, path)
    fields, tensors, _ = read_tensors(path)
    save_file(tensors, path, fields)
    with pytest.warns(UserWarning, match=r"file has no checksum, as files of earlier versions"):
        loaded = load(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


def test_the_digest_is_that_of_content_and_not_of_its_order() -> None:
    one, two = torch.ones(2, 3), torch.zeros(3, dtype=torch.bfloat16)
    assert digest_of({"a": one, "b": two}, {"x": "1", "y": "2"}) == digest_of(
        {"b": two, "a": one}, {"y": "2", "x": "1"}
    )
    others = [{"a": one}, {"a": one.T, "b": two}, {"a": one, "b": two.half()}, {"b": one, "a": two}]
    assert len({digest_of(tensors) for tensors in [{"a": one, "b": two}, *others]}) == 5


def test_a_file_of_no_tensors_has_a_checksum_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {}, {"a": "b"})
    assert read_tensors(tmp_path / "file") == ({"a": "b"}, {}, True)


def test_the_file_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file"
    with replacing(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
        assert temporary.parent == path.parent  # os.replace works within one file system only
    with replacing(path) as temporary:
        temporary.write_text("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
def test_an_error_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork beside threads
def test_a_killed_process_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    if (child := os.fork()) == 0:
        with replacing(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_text() == "old"


def test_the_new_file_has_the_permissions_of_an_ordinary_one(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    with replacing(tmp_path / "replaced") as temporary:
        temporary.write_text("")
    ordinary, replaced = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ordinary", "replaced"))
    assert replaced == ordinary
