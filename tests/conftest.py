"""Settings for all tests: nothing is fetched from a network, and GPU tests need a GPU."""

import os
import uuid

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test keeps its results where no other test or person does."""
    monkeypatch.setenv("LENGTHGEN_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where CUDA has no device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
