"""Compiled kernels of the Hub, for `use_kernels=True`, in place of packages that need nvcc. Stays in the package."""

from functools import cache
from operator import attrgetter
from typing import Any

from torch import nn
from transformers.utils import logging

from .layers_mixer import ScanMixer

logger = logging.get_logger(__name__)

# Repository in kernels-community, its version, and where the function is in its module, by the name in our scans. The
# arguments are those of the packages: read at huggingface/kernels-community 40d4194f.
HUB_KERNELS = {
    "causal_conv1d_fn": ("causal-conv1d", 1, "causal_conv1d_fn"),
    "mamba_chunk_scan_combined": ("mamba-ssm", 2, "mamba_chunk_scan_combined"),
    "chunk_dplr_delta_rule": ("fla", 1, "ops.generalized_delta_rule.chunk_dplr_delta_rule"),
    "chunk_gated_delta_rule": ("fla", 1, "ops.gated_delta_rule.chunk_gated_delta_rule"),
    "chunk_gla": ("fla", 1, "ops.gla.chunk_gla"),
    "chunk_kda": ("fla", 1, "ops.kda.chunk_kda"),
    "chunk_rwkv6": ("fla", 1, "ops.rwkv6.chunk_rwkv6"),
    "chunk_simple_gla": ("fla", 1, "ops.simple_gla.chunk_simple_gla"),
}


def use_hub_kernels(model: nn.Module) -> None:
    """Let the mixers of a model whose kernels are not installed take those of the Hub; where they cannot be had, the
    scans and convolutions stay in torch, and one warning says why."""
    mixers = [module for module in model.modules() if isinstance(module, ScanMixer)]
    if reasons := {why_not for mixer in mixers if (why_not := _fill(mixer))}:
        logger.warning_once(f"use_kernels: {'; '.join(sorted(reasons))}. What has no kernel runs in torch.")


def _fill(mixer: ScanMixer) -> str:
    """Put kernels where the scan and the convolutions of a mixer look them up; why that fails, or nothing."""
    functions: list[Any] = [] if mixer.kernel_available else [type(mixer).scan]
    functions += [type(module).forward for module in mixer.children() if isinstance(module, nn.Conv1d)]
    for scope in (function.__globals__ for function in functions):
        if scope.get("selective_scan", scope) is None:
            return "the scan of Mamba-1 needs Triton, which is not installed"
        for name in sorted(HUB_KERNELS.keys() & scope.keys()):
            if scope[name] is None:
                scope[name], why_not = hub_kernel(name)
                if why_not:
                    return why_not
    mixer.kernel_available = True
    return ""


@cache
def hub_kernel(name: str) -> tuple[Any, str]:
    """A function of `HUB_KERNELS`, which Transformers downloads; None and the reason where it cannot be had: offline,
    no build for this torch and GPU, `USE_HUB_KERNELS=NO`."""
    folder, version, path = HUB_KERNELS[name]
    repository = f"kernels-community/{folder}"
    try:
        from transformers.integrations import hub_kernels

        if not hub_kernels._kernels_enabled:
            raise ValueError("USE_HUB_KERNELS is off")
        function = attrgetter(path)(hub_kernels.get_kernel(repository, version=version))
    except Exception as error:  # of the Hub, of a dependency, of the code that it loads
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return None, f"{repository} version {version} cannot be loaded ({why:.200})"
    logger.info(f"use_kernels: {name} is that of {repository} version {version}.")
    return function, ""
