"""What users may import: every name is listed, documented, and there; nothing else is public by accident."""

import importlib.util
import inspect
import subprocess
import sys
import typing
from typing import Any

import pytest

import hf_recurrent_lengthgen

PACKAGES = ("", "checkpoints", "models", "trainers", "metrics", "data", "surgery", "state_files")


def module_of(name: str) -> object:
    return importlib.import_module("hf_recurrent_lengthgen" + (f".{name}" if name else ""))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    module = module_of(name)
    listed = module.__all__  # type: ignore[attr-defined]
    assert sorted({*listed}) == sorted(listed)
    for each in listed:
        found = getattr(module, each)
        assert not inspect.ismodule(found), each
        if inspect.isclass(found) or inspect.isfunction(found):
            assert inspect.getdoc(found), each


@pytest.mark.parametrize("name", PACKAGES)
def test_nothing_else_is_public(name: str) -> None:
    module = module_of(name)
    public = {
        each
        for each, found in vars(module).items()
        if not each.startswith("_")
        and not inspect.ismodule(found)
        and getattr(found, "__module__", "").startswith("hf_recurrent_lengthgen")
    }
    assert public <= {*module.__all__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_what_is_loaded_on_first_use_is_what_type_checkers_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    package: Any = module_of(name)
    places: Any = {"submodule_search_locations": package.__path__}
    spec = importlib.util.spec_from_file_location(package.__name__, package.__file__, **places)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    seen = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seen)
    for each in {*package.__all__} - {"__version__"}:
        assert vars(seen)[each] is getattr(package, each)


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = """
import sys, hf_recurrent_lengthgen as package
assert not {"torch", "transformers", "numpy"} & sys.modules.keys(), "heavy"
assert package.__version__[0].isdigit()
assert {"load_model", "stateful", "zero_state", "clone_state", "models", "trainers"} <= set(dir(package))
try:
    package.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hf_recurrent_lengthgen.models.StatefulMamba2Config.model_type == "stateful_mamba2"
