"""Settings for all tests: nothing is fetched from a network, and GPU tests need a GPU."""

import gc
import os
import runpy
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
# The same cases in every run, however slow the machine. `--hypothesis-profile default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test keeps its results where no other test or person does."""
    monkeypatch.setenv("LENGTHGEN_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"))


SCRIPTS = [
    path for folder in ("examples", "benchmarks") for path in (Path(__file__).parents[1] / folder).rglob("*.py")
]


def loaded_scripts() -> set[str]:
    """Those that are modules now."""
    names = {path.stem for path in SCRIPTS} & sys.modules.keys()
    return {name for name in names if Path(getattr(sys.modules[name], "__file__", None) or "") in SCRIPTS}


@pytest.fixture(autouse=True)
def own_scripts() -> Iterator[None]:
    """Each test imports its own: studies have files of one name, such as run.py, and find them by the path."""
    before = loaded_scripts()
    yield
    for name in loaded_scripts() - before:
        del sys.modules[name]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a file of examples/: as a command with these arguments, or, without any, for its names alone."""

    def run(file: str, *arguments: object) -> dict[str, Any]:
        path = Path(__file__).parents[1] / "examples" / file
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        return runpy.run_path(str(path), run_name="__main__" if arguments else None)

    return run


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty short files in place of the standard library, which takes seconds to read."""
    from hf_recurrent_lengthgen.cli import inputs
    from hf_recurrent_lengthgen.data import standard_library_corpus

    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        lines = (f"value_{index} = {index * number}\n" for index in range(100))
        (folder / f"file_{number}.py").write_text("".join(lines))
    corpus = standard_library_corpus(folder)
    monkeypatch.setattr(inputs, "standard_library_corpus", lambda: corpus)


def pytest_collection_finish() -> None:
    """Spare the collector what imports made: Accelerate calls it in each training, a third of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run one of so many cases of each test, never none; others with other releases of Transformers"
    parser.addoption("--one-of", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark cases of `thinned` tests `slow`, skip tests marked `gpu` where CUDA has no device; thin for `--one-of`."""
    cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if thinned := item.get_closest_marker("thinned"):
            (step,) = thinned.args
            if (cases[name] + zlib.crc32(name.encode())) % step:
                item.add_marker(pytest.mark.slow)
            cases[name] += 1
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    yield  # -m chooses
    kept = one_of(config.getoption("--one-of"), [item.nodeid for item in items])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def one_of(number: int, cases: Iterable[str]) -> set[str]:
    """Of the cases of each test, as many as a share of one in `number` rounds up to, as if drawn at random."""
    release = metadata.version("transformers")
    tests: dict[str, list[str]] = {}
    for case in sorted(cases, key=lambda case: zlib.crc32(f"{release} {case}".encode())):
        tests.setdefault(case.partition("[")[0], []).append(case)
    return {case for those in tests.values() for case in those[: ceil(len(those) / number)]}
