"""Kernels of flash-linear-attention (fla): found where they are installed, and fed in pieces that they can take.

They carry a float32 state from call to call, but multiply float32 matrices in TF32, below float32 round the states
between their chunks to the dtype of the inputs, and take differences of cumulated gates: gates of hundreds blur the
weak ones after them in a chunk of 64.

Shapes: B batch, T time, H heads, P head (value) dim, N state (key) dim.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .scan_backends import scan_in_pieces

# fla's kernels have chunks of 64 tokens if not told, and a grid at most 65535 blocks in its second and third axis.
# Offsets have 64 bits, with exceptions among releases: larger inputs go in groups of rows and in pieces of tokens.
_KERNEL_CHUNK = 64
_KERNEL_MAX_TOKENS = 65_535 * _KERNEL_CHUNK
_KERNEL_MAX_ELEMENTS = 2**30
_KERNEL_MAX_HEADS = 65_535


def fla_kernel(module: str, name: str) -> Any:
    """A function of flash-linear-attention (fla), or None where fla or triton is not installed.

    fla is imported by the first call only: that takes seconds, warns, and registers fla's classes for Transformers'
    own `mamba` and `mamba2`, which is undone here.
    """
    if any(importlib.util.find_spec(package) is None for package in ("fla", "triton")):
        return None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _import_from_fla(module, name)(*args, **kwargs)

    return kernel


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
    """Call a scan of fla, whose states are (B, H, N, P), in pieces that it can take.

    `inputs` are over time, (B, T, H, ...): the queries, then all others. The outputs have the dtype of the queries.
    The kernel keeps a state for each `chunk` tokens.
    """
    (_, length, heads, _), state = inputs[0].shape, initial_state[0].numel()

    def piece(*pieces: Tensor) -> tuple[Tensor, Tensor]:
        *over_time, state = pieces
        return scan(*over_time, scale=1.0, initial_state=state, output_final_state=True)

    tokens = min(_KERNEL_MAX_TOKENS, chunk * max(1, _KERNEL_MAX_ELEMENTS // state))
    chunks = -(-min(length, tokens) // chunk)
    # of one row: inputs and chunk states
    elements = chunks * max(chunk * heads * max(initial_state.shape[2:]), state)
    rows = max(1, min(_KERNEL_MAX_ELEMENTS // elements, _KERNEL_MAX_HEADS // heads))
    y, final_state = scan_in_pieces(piece, inputs, initial_state.mT.contiguous(), rows, tokens)
    return y.to(inputs[0].dtype), final_state.mT.to(initial_state.dtype).contiguous()
