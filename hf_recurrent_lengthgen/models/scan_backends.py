"""Which implementation of a scan runs: decided once per setting and device, logged once."""

from functools import cache
from typing import Literal

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

ScanBackend = Literal["torch", "kernel"]
SCAN_BACKEND_SETTINGS = ("auto", "torch", "kernel")
INSTALL_HINT = 'pip install "hf_recurrent_lengthgen[kernels]"'


def check_backend_setting(setting: str, kernel_available: bool) -> None:
    """Refuse an unknown `scan_backend`, and "kernel" where its packages are missing.

    Raises:
        ValueError: naming the setting, what is allowed and the packages to install.
    """
    if setting not in SCAN_BACKEND_SETTINGS:
        raise ValueError(f"scan_backend must be one of {SCAN_BACKEND_SETTINGS}, got {setting!r}.")
    if setting == "kernel" and not kernel_available:
        raise ValueError(
            f'scan_backend="kernel" needs kernels that are not installed: {INSTALL_HINT}, or use "auto" or "torch".'
        )


@cache
def _log_choice(setting: str, device_type: str, backend: ScanBackend, limit: str) -> None:
    reason = f" (the kernels need {limit})" if limit else ""
    logger.info(f"scan_backend={setting!r} on {device_type}: using {backend!r}{reason}.")


def resolve_backend(setting: str, device_type: str, kernel_available: bool, limit: str = "") -> ScanBackend:
    """Turn the setting "auto", "torch" or "kernel" into the backend for a device type.

    "auto" takes the kernel if it is installed, the tensors are on a GPU and no `limit` of the kernels
    speaks against it. The choice never depends on the sequence length.

    Args:
        setting: The configuration's `scan_backend`.
        device_type: Where the inputs are.
        kernel_available: Whether the kernels are installed.
        limit: What the kernels need and the model does not have, in words; empty if nothing.

    Raises:
        ValueError: for "kernel" on a device without GPU or beyond a limit of the kernels.
    """
    check_backend_setting(setting, kernel_available)
    if setting == "kernel" and device_type != "cuda":
        raise ValueError(f'scan_backend="kernel" runs on CUDA devices only, the inputs are on {device_type!r}.')
    if setting == "kernel" and limit:
        raise ValueError(f'scan_backend="kernel": the kernels need {limit}; use "auto" or "torch".')
    use_kernel = setting != "torch" and kernel_available and device_type == "cuda" and not limit
    backend: ScanBackend = "kernel" if use_kernel else "torch"
    if not torch.compiler.is_compiling():  # it would break the graph
        _log_choice(setting, device_type, backend, limit)
    return backend
