"""Wheel and source distribution hold what they should, once."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_recurrent_lengthgen"


class Built(NamedTuple):
    source: Path
    sdist_files: list[str]  # without the leading folder
    wheel: Path  # built from the source distribution
    info: str  # the folder of the wheel's metadata
    wheel_files: list[str]
    direct_wheel_files: list[str]  # of the wheel built from the working tree


def copy_working_tree(target: Path) -> None:
    """Copy what git would commit; without git, what is not an environment, a build or a cache."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        ignored = shutil.ignore_patterns(
            ".venv*", "build", "dist", "*.egg-info", "demo-output", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
        return
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def build(source: Path, target: Path, *options: str) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        *options,
        "--outdir",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


def files_of_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        return [name for name in wheel.namelist() if not name.endswith("/")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    copy_working_tree(folder / "source")
    build(folder / "source", folder / "direct", "--wheel")
    shutil.rmtree(folder / "source" / "build")
    build(folder / "source", folder / "dist")
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    [direct_wheel] = (folder / "direct").glob("*.whl")
    with tarfile.open(sdist) as archive:
        sdist_files = [member.name.partition("/")[2] for member in archive if not member.isdir()]
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    return Built(folder / "source", sdist_files, wheel, info, files_of_wheel(wheel), files_of_wheel(direct_wheel))


def expected_modules(source: Path) -> set[str]:
    """Every module of the working tree by its installed path."""
    modules = {path.relative_to(source).as_posix() for path in (source / PACKAGE).rglob("*.py")}
    return modules | {f"{PACKAGE}/{path.relative_to(source)}" for path in (source / "trainers").rglob("*.py")}


@pytest.mark.slow
def test_the_wheel_holds_every_module_once(built: Built) -> None:
    modules = Counter(name for name in built.wheel_files if name.endswith(".py"))
    assert modules == Counter(expected_modules(built.source))
    assert f"{PACKAGE}/trainers/__init__.py" in modules


@pytest.mark.slow
def test_the_wheel_holds_recipes_tasks_helps_types_license_and_nothing_else(built: Built) -> None:
    others = {name for name in built.wheel_files if not name.endswith(".py")}
    data = {
        path.relative_to(built.source).as_posix()
        for folder in ("cli", "harness", "recipes")
        for path in (built.source / PACKAGE / folder).rglob("*")
        if path.suffix in (".json", ".md", ".txt", ".yaml")
    }
    assert len(data) > 40
    names = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"]
    assert others == data | {f"{PACKAGE}/py.typed", *(f"{built.info}/{name}" for name in names)}
    assert {name.partition("/")[0] for name in built.wheel_files} == {PACKAGE, built.info}


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel_as_the_working_tree(built: Built) -> None:
    assert sorted(built.wheel_files) == sorted(built.direct_wheel_files)


@pytest.mark.slow
def test_the_source_distribution_holds_the_sources_once(built: Built) -> None:
    files = Counter(built.sdist_files)
    assert max(files.values()) == 1
    assert files.keys() >= {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        f"{PACKAGE}/py.typed",
        "trainers/__init__.py",
    }
    assert not [name for name in files if name.startswith((f"{PACKAGE}/trainers", "tests/", "benchmarks/"))]


@pytest.mark.slow
def test_the_wheel_declares_what_pyproject_says(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        metadata = HeaderParser().parsestr(wheel.read(f"{built.info}/METADATA").decode())
    project = tomllib.loads((built.source / "pyproject.toml").read_text())["project"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert set(map(Requirement, required)) == set(map(Requirement, project["dependencies"]))


@pytest.mark.slow
def test_the_unpacked_wheel_imports_without_the_repository(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path / "installed")
    code = f"""
import importlib, pkgutil, sys
from importlib.metadata import EntryPoint
sys.path.insert(0, {str(tmp_path / "installed")!r})
import {PACKAGE} as package
for module in pkgutil.walk_packages(package.__path__, "{PACKAGE}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert callable(EntryPoint("lengthgen", "{PACKAGE}.cli.main:main", "console_scripts").load())
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in ("{PACKAGE}", "trainers"):
        print(name, module.__file__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    places = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert f"{PACKAGE}.trainers" in places
    assert "trainers" not in places
    assert [place for place in places.values() if not place.startswith(str(tmp_path / "installed"))] == []
