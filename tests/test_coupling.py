"""The package relies on few private names of other libraries; `.ci/coupling.py` finds them."""

import runpy
from pathlib import Path

import pytest

LIMITS = {
    "overridden": 17,
    "read from classes that ours extend": 6,
    "read elsewhere": 16,
    "imported": 6,
    "swapped": 0,
}


@pytest.mark.slow
def test_few_private_names_of_other_libraries_are_used() -> None:
    script = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "coupling.py"))
    found = script["coupling"]()
    assert found.keys() == LIMITS.keys()
    assert {what: sorted(names) for what, names in found.items() if len(names) > LIMITS[what]} == {}
