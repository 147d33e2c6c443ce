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
def resolve_backend(setting: str, device_type: str, kernel_available: bool) -> ScanBackend:
    """Turn the setting "auto", "torch" or "kernel" into the backend for a device type.

    "auto" takes the kernel if it is installed and the tensors are on a GPU. The choice never depends on
    the sequence length.

    Raises:
        ValueError: for "kernel" on a device without GPU.
    """
    check_backend_setting(setting, kernel_available)
    if setting == "kernel" and device_type != "cuda":
        raise ValueError(f'scan_backend="kernel" runs on CUDA devices only, the inputs are on {device_type!r}.')
    use_kernel = setting == "kernel" or (setting == "auto" and kernel_available and device_type == "cuda")
    backend: ScanBackend = "kernel" if use_kernel else "torch"
    if not torch.compiler.is_compiling():  # a log call would break the graph
        logger.info(f"scan_backend={setting!r} on {device_type}: using {backend!r}.")
    return backend
