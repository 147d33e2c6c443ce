"""Fixtures that other folders of tests import from here: `from ..hub.conftest import hub`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .checkpoints import write_checkpoint
from .client import connect
from .endpoint import Endpoint


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A running endpoint that the client in this process speaks to as `user`, with a cache of its own."""
    with Endpoint() as endpoint:
        connect(endpoint, tmp_path / "hf", monkeypatch)
        yield endpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder that may be pushed."""
    return write_checkpoint(tmp_path / "checkpoint")
