"""What a result is the result of: digests of data and weights, versions."""

import functools
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def token_digest(tokens: np.ndarray) -> str:
    """SHA-256 of the shape and the ids as little-endian int64: equal for equal ids of any integer dtype."""
    digest = hashlib.sha256(repr(tokens.shape).encode())
    for row in tokens:
        digest.update(row.astype("<i8").tobytes())
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def model_record(model: Any) -> dict[str, str]:
    """What the predictions of a model depend on: its class, weights, config and kind of device."""
    config = model.config
    plain = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    text = json.dumps({key: repr(value) for key, value in plain.items() if key != "_name_or_path"}, sort_keys=True)
    return {
        "class": type(model).__name__,
        "weights": weights_digest(model),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "device": next(model.parameters()).device.type,
    }


@functools.cache
def code_digest() -> str:
    """SHA-256 of the source files of this package that results depend on."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for part in ("data", "evaluation", "hybrids", "models"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages the numbers depend on."""
    names = ("hf_recurrent_lengthgen", "torch", "transformers", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
