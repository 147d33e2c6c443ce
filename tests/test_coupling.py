"""The package relies on few private names of other libraries; `.ci/coupling.py` finds them."""

import runpy
from pathlib import Path

import pytest

LIMITS = {
    "overridden": 4,
    "read from classes that ours extend": 2,
    "read elsewhere": 17,
    "imported": 5,
    "swapped": 0,
}


@pytest.mark.slow
def test_few_private_names_of_other_libraries_are_used_and_each_has_its_reason() -> None:
    script = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "coupling.py"))
    found = script["coupling"]()
    assert found.keys() == LIMITS.keys()
    assert {what: sorted(names) for what, names in found.items() if len(names) > LIMITS[what]} == {}
    assert script["problems"](found) == []
