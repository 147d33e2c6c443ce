"""Settings for all tests: nothing is fetched from a network, and GPU tests need a GPU."""

import gc
import os
import random
import runpy
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
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


SCRIPTS = {
    path.stem for folder in ("examples", "benchmarks") for path in (Path(__file__).parents[1] / folder).rglob("*.py")
} - {"tests"}


@pytest.fixture(autouse=True)
def own_scripts() -> Iterator[None]:
    """Each test imports its own: studies have files of one name, such as run.py, and find them by the path."""
    before = SCRIPTS & sys.modules.keys()
    yield
    for name in (SCRIPTS & sys.modules.keys()) - before:
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
    text = "run every case of tests of three and more parameters, not only each pair of values once"
    parser.addoption("--every-case", action="store_true", help=text)
    text = "run each N-th case of a test, and three times as many of hybrids, whose stock code differs by release"
    parser.addoption("--each", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark cases of `thinned` tests `slow`, skip tests of a GPU where there is none, choose pairs of values."""
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
    if not config.getoption("--every-case"):
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {those[index] for those in tests.values() for index in covering([*map(values_of, those)])}
        keep(config, items, lambda item: item in kept)
    places: Counter[str] = Counter()
    keep(config, items, lambda item: is_among_each(item, config.getoption("--each"), places))


def is_among_each(item: pytest.Item, step: int, places: Counter[str]) -> bool:
    """Whether a case is the first of `step`, or of a third of it for hybrids; `places` counts those of its test."""
    name = item.nodeid.partition("[")[0]
    places[name] += 1
    return (places[name] - 1) % (max(1, step // 3) if "hybrids" in name else step) == 0


def keep(config: pytest.Config, items: list[pytest.Item], chosen: Callable[[pytest.Item], bool]) -> None:
    those = {item: chosen(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not those[item]])
    items[:] = [item for item in items if those[item]]


def values_of(item: pytest.Item) -> list[Hashable]:
    """What each `parametrize` and each fixture with parameters gives to a case."""
    values = {name: id(value) for name, value in getattr(item, "callspec", SimpleNamespace(params={})).params.items()}
    marked = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [[name.strip() for name in (mark.split(",") if isinstance(mark, str) else mark)] for mark in marked]
    together = [tuple(values.pop(name) for name in those) for those in names]
    return [*together, *values.values()]


def covering(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Indices of cases that have, together, each pair of values of two parameters that is in any (pairwise testing).

    All cases of fewer than three parameters. The next is one with the most pairs that are missing, drawn at random
    but the same in each run.
    """
    if len(cases[0]) < 3:
        return {*range(len(cases))}
    pairs = [{*combinations(enumerate(case), 2)} for case in cases]
    missing, chosen = set[Any]().union(*pairs), set[int]()
    order = random.Random(0).sample(range(len(cases)), len(cases))
    while missing:
        best = max(order, key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
