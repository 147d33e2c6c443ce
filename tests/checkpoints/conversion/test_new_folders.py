"""Where checkpoints can be made: new folders, and empty ones that cannot be replaced."""

import errno
import os
import re
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, new_folder


def save(folder: Path) -> None:
    check_new(folder)
    with new_folder(folder) as temporary:
        for name in ("config.json", "model.safetensors"):
            (temporary / name).write_text(name)
        (temporary / "templates").mkdir()
        (temporary / "templates" / "one").write_text("one")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


WRITTEN = ["config.json", "model.safetensors", "templates", "templates/one"]


@pytest.mark.parametrize("empty", [True, False])
def test_of_a_link_the_folder_is_meant_that_it_leads_to(tmp_path: Path, empty: bool) -> None:
    if empty:
        (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "far" / "away") == WRITTEN
    assert names(tmp_path) == ["far", "far/away", *(f"far/away/{name}" for name in WRITTEN), "link"]


def test_the_working_directory_stays_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    save(Path("."))
    assert tmp_path.stat().st_ino == before
    assert sorted(os.listdir()) == ["config.json", "model.safetensors", "templates"]


def test_a_mount_point_gets_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount, replace = tmp_path / "mount", os.replace
    mount.mkdir()

    def as_of_a_mount(source: Path, target: Path) -> None:
        if target == mount:
            raise OSError(errno.EBUSY, "Device or resource busy")
        if not source.is_relative_to(mount):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr("os.replace", as_of_a_mount)
    save(mount)
    assert names(mount) == WRITTEN


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("full", "full exists already and is not an empty folder"),
        ("full/file", "file exists already and is not an empty folder"),
        ("full/file/out", "full/file exists already and is not an empty folder"),
        ("to full", "full exists already and is not an empty folder"),
    ],
)
def test_what_cannot_become_a_checkpoint_is_refused_at_once(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "to full").symlink_to(tmp_path / "full")
    with pytest.raises(ValueError, match=re.escape(message)):
        check_new(tmp_path / place)
