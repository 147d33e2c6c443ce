"""Skips where Transformers is too old for `stateful`."""

from pathlib import Path

import pytest

from tests.versions import needs_hybrids


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name != "test_versions.py":
            item.add_marker(needs_hybrids)
