"""Which Python `make` takes for its environments: recipes are printed (make -n), not run."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STARTS = "#!/bin/sh\nexit 0\n"
FAILS = "#!/bin/sh\nexit 127\n"  # a shim of pyenv for a version that is not active; a Python without ensurepip


def printed(folder: Path, found: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """What `make -n` says of the first environment, with these commands on the PATH and no others."""
    make = shutil.which("make")
    assert make is not None
    (folder / "bin").mkdir()
    for name, script in found.items():
        (folder / "bin" / name).write_text(script, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        [make, "-n", *options, ".venv/.installed"],
        cwd=folder,
        env={"PATH": str(folder / "bin")},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        pytest.param({"python3.11": STARTS, "python3.13": STARTS}, "python3.11", id="first-of-several"),
        pytest.param({"python3.13": STARTS}, "python3.13", id="only-the-newest"),
        pytest.param({"python3.11": FAILS, "python3.12": STARTS}, "python3.12", id="first-that-starts"),
    ],
)
def test_the_first_supported_python_makes_the_environment(found: dict[str, str], taken: str, tmp_path: Path) -> None:
    done = printed(tmp_path, found)
    assert done.returncode == 0, done.stderr
    assert f"\n{taken} -m venv .venv\n" in done.stdout


def test_a_named_python_comes_first(tmp_path: Path) -> None:
    done = printed(tmp_path, {"python3.11": STARTS}, "PYTHON=/opt/mine/python3")
    assert "\n/opt/mine/python3 -m venv .venv\n" in done.stdout


@pytest.mark.parametrize("found", [{}, {"python3.14": STARTS}, {"python3.11": FAILS}], ids=str)
def test_without_one_make_says_what_to_install(found: dict[str, str], tmp_path: Path) -> None:
    done = printed(tmp_path, found)
    assert done.returncode != 0
    assert "-m venv" not in done.stdout
    for part in ("Python 3.11, 3.12 or 3.13", "apt install python3.13-venv", "make PYTHON=/path/to/python3.13"):
        assert part in done.stderr
