"""A file is the old one or the new one, whatever happens in between."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.models.atomic_files import replacing


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


def test_a_killed_process_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    module = Path(sys.modules[replacing.__module__].__file__ or "")
    script = (
        f"import sys, os, signal; sys.path.insert(0, {str(module.parent)!r})\n"
        "from atomic_files import replacing\n"
        f"with replacing({str(path)!r}) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-I", "-c", script], check=False)
    assert result.returncode == -9
    assert path.read_text() == "old"


def test_the_new_file_has_the_permissions_of_an_ordinary_one(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    with replacing(tmp_path / "replaced") as temporary:
        temporary.write_text("")
    ordinary, replaced = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ordinary", "replaced"))
    assert replaced == ordinary
