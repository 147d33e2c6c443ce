"""The range of Transformers releases: said once, checked at import, and what travelling code needs of them."""

import importlib.metadata
import inspect
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.utils import logging

from hf_recurrent_lengthgen.models import configuration_stateful
from hf_recurrent_lengthgen.models.configuration_stateful import CACHE_NAME, NEWEST, OLDEST

ROOT = Path(__file__).parents[2]


def test_the_range_is_the_same_wherever_it_is_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = next(r for r in map(Requirement, project["dependencies"]) if r.name == "transformers")
    assert {str(part) for part in needed.specifier} == {f">={'.'.join(map(str, OLDEST))}", f"<5.{NEWEST[1] + 1}"}
    for file, release in (("constraints.txt", NEWEST), ("constraints-oldest.txt", OLDEST)):
        pin = re.search(r"^transformers==(.*)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert pin is not None
        assert Version(pin[1]).release[:2] == release
    if Version(transformers.__version__).release[:2] == NEWEST:
        kernels = next(line for line in importlib.metadata.requires("transformers") or () if "kernels" in line)
        low, high = sorted(map(str, Requirement(kernels).specifier), reverse=True)
        sentence = f"`kernels{low},{high}` for Transformers {'.'.join(map(str, NEWEST))}"
        assert sentence in (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("release", ["4.57.0", "5.20.2"])
def test_an_older_release_is_refused_in_a_sentence(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", release)  # which replaces itself when imported
    with pytest.raises(ImportError, match=rf"Transformers {release} is installed.*need 5\.21 to .*pip install"):
        runpy.run_path(configuration_stateful.__file__)


@pytest.mark.parametrize(
    ("release", "name"), [("5.23.2", "past_key_values"), ("5.24.0", "cache"), ("5.77.0.dev0", "cache")]
)
def test_a_newer_release_is_tried_with_a_warning(release: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys.modules["transformers"], "__version__", release)  # which replaces itself when imported
    monkeypatch.setattr(
        type(logging.get_logger(__name__)), "warning_once", lambda self, text: said.append(text), raising=False
    )
    assert runpy.run_path(configuration_stateful.__file__)["CACHE_NAME"] == name
    assert [text.split(" is installed")[0] for text in said] == ["Transformers 5.77.0.dev0"] * ("77" in release)


def test_generate_calls_the_cache_as_we_think() -> None:
    named = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
    assert CACHE_NAME in named
