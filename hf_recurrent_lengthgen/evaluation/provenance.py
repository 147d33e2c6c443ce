"""What a result is the result of: digests of data and weights, versions."""

import hashlib
import platform
from importlib import metadata

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


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages the numbers depend on."""
    names = ("hf_recurrent_lengthgen", "torch", "transformers", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
