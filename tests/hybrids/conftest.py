"""Skips where Transformers is too old for `stateful`."""

from pathlib import Path

import pytest
import transformers
from transformers.cache_utils import Cache


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if hasattr(Cache, "get_recurrent_state"):
        return
    reason = f"hybrids need Transformers 5.21 or newer, {transformers.__version__} is installed"
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name != "test_versions.py":
            item.add_marker(pytest.mark.skip(reason=reason))
