"""The origin of a result: digests of data, weights, config and code."""

import functools
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_recurrent_lengthgen.evaluation.results import ForgettingRule
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.versions import installed_versions

ADAPTER_SETTINGS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling", "use_dora", "use_rslora")
"""Attributes of an adapter layer (PEFT) that change predictions and are in neither weights nor config of the model."""


def token_digest(tokens: np.ndarray) -> str:
    """SHA-256 of the shape and the ids as little-endian int64: equal for equal ids of any integer dtype."""
    digest = hashlib.sha256(repr(tokens.shape).encode())
    for row in tokens:
        digest.update(row.astype("<i8").tobytes())
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all parameters, and of the buffers saved with them."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):  # extra state of a module
            digest.update(f"{name} {value!r}".encode())
            continue
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def config_digest(config: Any, without: str = "") -> str:
    """SHA-256 of all fields of a config, `without` one of them."""
    plain = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return _digest_of({key: repr(value) for key, value in plain.items() if key not in ("_name_or_path", without)})


def model_record(model: Any) -> dict[str, str]:
    """Everything that the predictions of a model depend on: class, weights, config, adapters, code and device type."""
    adapters = {
        name: [repr(getattr(module, setting, None)) for setting in ADAPTER_SETTINGS]
        for name, module in model.named_modules()
        if hasattr(module, "active_adapters") and hasattr(module, "scaling")
    }
    return {
        "class": type(model).__name__,
        "weights": weights_digest(model),
        "config": config_digest(model.config),
        "adapters": _digest_of(adapters),
        "code": _digest_of(foreign_code(map(type, model.modules()))),
        "device": next(model.parameters()).device.type,
    }


def run_record(model: Any, began: float) -> dict[str, Any]:
    """Fields of a result: versions, seconds since `began` (`time.perf_counter`), forgetting and attention window."""
    return {
        "wall_seconds": time.perf_counter() - began,
        "versions": installed_versions(),
        "forgetting": ForgettingRule(**Forgetting.of(getattr(model, "config", None))._asdict()),
        "attention_window": attention_window(model),
    }


def _digest_of(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def foreign_code(classes: Iterable[type]) -> dict[str, str]:
    """Digests of the source files of classes outside installed packages, such as a checkpoint's code or a metric's."""
    installed = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
    files = {getattr(sys.modules.get(one.__module__), "__file__", None) for one in classes}
    return {
        Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in files
        if file is not None and not file.startswith(installed) and Path(file).is_file()
    }


@functools.cache
def code_digest() -> str:
    """SHA-256 of the source files of this package that results depend on."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for part in ("data", "evaluation", "hybrids", "metrics", "models"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
