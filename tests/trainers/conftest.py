"""The models, data and runs of toys.py for all trainer tests."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_recurrent_lengthgen.trainers import StatePassingConfig


@pytest.fixture(scope="session")
def toys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer_toys", Path(__file__).with_name("toys.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_config(tmp_path: Path, toys: ModuleType) -> Callable[..., StatePassingConfig]:
    """Settings for a quiet run on the CPU that saves nothing; fields are given by keyword."""

    def make(**fields: Any) -> StatePassingConfig:
        return StatePassingConfig(
            str(tmp_path / "run"), **toys.QUIET | {"save_strategy": "no", "per_device_train_batch_size": 2} | fields
        )

    return make
