"""The settings of trainer tests; their models, data and runs are in toys.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.trainers import StatePassingConfig
from tests.trainers import toys


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., StatePassingConfig]:
    """Settings for a quiet run on the CPU that saves nothing; fields are keywords."""

    def make(**fields: Any) -> StatePassingConfig:
        return StatePassingConfig(
            str(tmp_path / "run"), **toys.QUIET | {"save_strategy": "no", "per_device_train_batch_size": 2} | fields
        )

    return make
