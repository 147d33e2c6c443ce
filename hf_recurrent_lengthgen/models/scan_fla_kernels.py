"""Kernels of flash-linear-attention (fla): found where they are installed, and fed in blocks that they can take.

They carry a float32 state from call to call, but multiply float32 matrices in TF32, below float32 round the states
between their chunks to the dtype of the inputs, and take differences of cumulated gates: gates of hundreds blur the
weak ones after them in a chunk of 64.

Shapes: B batch, T time, H heads, P head (value) dim, N state (key) dim.
"""

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .scan_backends import ScanBackend, scan_in_blocks

# fla's kernels have chunks of 64 tokens by default, and a grid at most 65535 blocks in its second and third axis.
# Offsets have 64 bits, with exceptions among releases: larger inputs go in groups of rows and in blocks of tokens.
_KERNEL_CHUNK = 64
_KERNEL_MAX_TOKENS = 65_535 * _KERNEL_CHUNK
_KERNEL_MAX_ELEMENTS = 2**30
_KERNEL_MAX_HEADS = 65_535


def fla_kernel(module: str, name: str) -> Any:
    """A function of flash-linear-attention (fla), or None where fla or triton is not installed.

    Also None where fla has no such module: those of layers have these names since 0.6, and before it partly wrong
    gradients and addresses of 32 bits. fla is imported by the first call only: that takes seconds, warns, and
    registers fla's classes for Transformers' own `mamba` and `mamba2`, which is undone here.
    """
    fla, triton = (importlib.util.find_spec(package) for package in ("fla", "triton"))
    if fla is None or triton is None:
        return None
    file = Path(fla.submodule_search_locations[0], *module.split(".")[1:])  # type: ignore[index]
    return _Imported(module, name) if file.is_dir() or file.with_suffix(".py").exists() else None


class _Imported:
    """A function that is imported by its first use."""

    def __init__(self, *place: str) -> None:
        self.place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _import_from_fla(*self.place)(*args, **kwargs)

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_import_from_fla(*self.place))


@cache
def _import_from_fla(module: str, name: str) -> Callable[..., Any]:
    registered = CONFIG_MAPPING._extra_content
    before = set(registered)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    for model_type in (set(registered) - before) & set(CONFIG_MAPPING._mapping):
        del registered[model_type]
    return function


def refuses_gates_of_heads(device: torch.device) -> bool:
    """Whether fla's kernels with one gate per head raise an error in a backward pass, those with one per channel not.

    On Hopper, Triton 3.4 to 3.7.0 compiles the first wrongly (issue 640 of fla).
    """
    return torch.is_grad_enabled() and _compiled_wrongly(device)


@cache
def _compiled_wrongly(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    version = TorchVersion(importlib.import_module("triton").__version__)
    return bool(version >= "3.4.0" and version < "3.7.1")


def scan_with_fla(
    scan: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    initial_state: Tensor,
    chunk: int = _KERNEL_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Call a scan of fla in blocks that it can take.

    Its states are (B, H, N, P), and since 0.6 ours by an option that RWKV's do not have: without it they are copied,
    unless `initial_state` is the transpose of such a state, as of a hybrid; then the result is one, too.
    `inputs` are over time, (B, T, H, ...): the queries, then all others. The outputs have the dtype of the queries.
    The kernel keeps a state for each `chunk` tokens.
    """
    (_, length, heads, _), state = inputs[0].shape, initial_state[0].numel()
    whole = initial_state.is_contiguous()
    options = {"state_v_first": True} if whole and "state_v_first" in inspect.signature(scan).parameters else {}

    def block(*blocks: Tensor) -> tuple[Tensor, Tensor]:
        *over_time, state = blocks
        return scan(*over_time, scale=1.0, initial_state=state, output_final_state=True, **options)

    tokens = min(_KERNEL_MAX_TOKENS, chunk * max(1, _KERNEL_MAX_ELEMENTS // state))
    chunks = -(-min(length, tokens) // chunk)
    # of one row: inputs and chunk states
    elements = chunks * max(chunk * heads * max(initial_state.shape[2:]), state)
    rows = max(1, min(_KERNEL_MAX_ELEMENTS // elements, _KERNEL_MAX_HEADS // heads))
    before = initial_state if options else initial_state.mT
    y, final_state = scan_in_blocks(block, inputs, before.contiguous(), rows, tokens)
    final_state = (final_state if options else final_state.mT).to(initial_state.dtype)
    return y.to(inputs[0].dtype), final_state.contiguous() if whole else final_state


def fused(kernel: Any, x: Tensor, backend: ScanBackend) -> bool:
    """Whether a layer takes a function of fla for x (B, T, ...); torch.compile fuses a layer by itself."""
    return backend == "kernel" and kernel is not None and x.shape[1] > 1 and not torch.compiler.is_compiling()
