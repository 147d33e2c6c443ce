"""Wheel and source distribution hold what they should, once."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hf_recurrent_lengthgen.checkpoints import papers

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_recurrent_lengthgen"


class Built(NamedTuple):
    source: Path
    sdist_files: list[str]  # without the leading folder
    wheel: Path  # built from the source distribution
    info: str  # the folder of the wheel's metadata
    wheel_files: list[str]


def copy_working_tree(target: Path) -> None:
    """Copy what git would commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def files_of_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        return [name for name in wheel.namelist() if not name.endswith("/")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    copy_working_tree(folder / "source")
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        sdist_files = [member.name.partition("/")[2] for member in archive if not member.isdir()]
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    return Built(folder / "source", sdist_files, wheel, info, files_of_wheel(wheel))


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
        for folder in ("checkpoints", "cli", "harness", "recipes")
        for path in (built.source / PACKAGE / folder).rglob("*")
        if path.suffix in (".jinja", ".json", ".md", ".txt", ".yaml")
    }
    assert len(data) > 40
    names = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"]
    assert others == data | {f"{PACKAGE}/py.typed", *(f"{built.info}/{name}" for name in names)}
    assert {name.partition("/")[0] for name in built.wheel_files} == {PACKAGE, built.info}


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
def test_the_unpacked_wheel_imports_without_the_repository(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path / "installed")
    code = f"""
import importlib, pkgutil, sys
from importlib.metadata import EntryPoint
sys.path.insert(0, {str(tmp_path / "installed")!r})
import {PACKAGE} as package
for module in pkgutil.walk_packages(package.__path__, "{PACKAGE}."):
    if not module.name.endswith(("__main__", ".scan_selective_kernel")):  # the latter needs Triton
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
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    places = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert f"{PACKAGE}.trainers" in places
    assert "trainers" not in places
    assert [place for place in places.values() if not place.startswith(str(tmp_path / "installed"))] == []


def test_citation_and_metadata_name_the_papers_of_the_methods() -> None:
    """The same as model cards do (`papers.py`), and the version of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        paper["url"]: (paper["title"], [f"{one['family-names']}, {one['given-names']}" for one in paper["authors"]])
        for paper in citation["references"]
    }
    cited = (papers.UNEXPLORED_STATES, papers.MIMETIC, papers.ALIGNMENT, papers.STUFFED_MAMBA, papers.STATEX)
    title = str.maketrans("", "", "{}")
    assert named == {paper.address: (paper.title.translate(title), paper.authors.split(" and ")) for paper in cited}
    assert set(project["urls"].values()) == named.keys()
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
