"""What all scans share: the choice of the implementation, its dtype, and cutting into blocks.

A scan is a recurrence over time with any initial state and a final state. Every file `scan_*.py` has a chunked
form in plain torch whose backward pass recomputes what is inside a chunk, a step for one token, and a GPU kernel, all
behind one function. It gives outputs in the dtype of the first input, and the state after the
last token in the dtype of the one before the first. Gradients flow to all tensor arguments and from both results.
Arguments of all scans:

    chunk_size: Tokens per chunk. It changes speed and memory, and the result by rounding only. Kernels have their own.
    backend: "torch" or "kernel".
    in_place: Whether the initial state may be overwritten with the final one, which only a call without gradients and
        with a single token does.

Shape suffixes of all scans: B batch, T time, H heads, P head (value) dim, G groups, D inner channels, N state (key)
dim, Q chunk; a state is (B, H, P, N) or (B, D, N).
"""

import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

ScanBackend = Literal["torch", "kernel"]
Inputs = Sequence[Tensor]
"""What a scan reads before the state, in the order of its arguments."""
# Every copy of this file, as in checkpoints, has operators of its own. torch names them in ASCII, folders need not.
OPERATORS = f"{re.sub(r'[^a-zA-Z0-9]', '_', __name__)}_{zlib.crc32(__name__.encode()):08x}"
INSTALL_HINT = 'pip install "hf_recurrent_lengthgen[kernels]"'


@cache
def _log_choice(setting: str, device_type: str, backend: ScanBackend, limit: str) -> None:
    reason = f" (the kernels need {limit})" if limit else ""
    logger.info(f"scan_backend={setting!r} on {device_type}: using {backend!r}{reason}.")


def resolve_backend(
    setting: str, device_type: str, kernel_available: bool, limit: str = "", trained: str = ""
) -> ScanBackend:
    """Turn the setting "auto", "torch" or "kernel" into the backend for a device type.

    "auto" takes the kernel if it is installed, the tensors are on a GPU and the model meets the kernel's limits:
    `limit` is what it does not meet, in words. The choice never depends on the sequence length. Raises a `ValueError`
    for "kernel" where it cannot run. Where "auto" finds none on a GPU for what is `trained`, one warning says why.
    """
    missing = f"to be installed ({INSTALL_HINT})" if not kernel_available else limit
    if kernel_available and device_type != "cuda":
        missing = f"a CUDA device, the inputs are on {device_type!r}"
    if setting == "kernel" and missing:
        raise ValueError(f'scan_backend="kernel": the kernels need {missing}; use "auto" or "torch".')
    use_kernel = setting != "torch" and kernel_available and device_type == "cuda" and not limit
    backend: ScanBackend = "kernel" if use_kernel else "torch"
    if not torch.compiler.is_compiling():  # it would break the graph
        _log_choice(setting, device_type, backend, limit)
        if trained and setting == "auto" and device_type == "cuda" and not use_kernel:
            logger.warning_once(
                f"{trained} is trained on a GPU in plain torch, without its kernels, which need {missing}."
            )
    return backend


def run_scan(
    chunked: Callable[..., tuple[Tensor, Tensor]],
    kernel: Callable[..., tuple[Tensor, Tensor]],
    step: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    initial_state: Tensor,
    chunk_size: int,
    backend: str,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Call `chunked` or `kernel` with `(inputs, initial_state, chunk_size)`.

    One token goes to `step` with `(inputs, initial_state, out)` on every backend; `out` is the state itself where it
    may be overwritten (`in_place`), else None. Chunked form and step receive their inputs in the dtype of the state,
    with autocast off, and their outputs return to the dtype of the first input. The kernel receives everything as it
    is.

    NaN or infinite inputs of a token may reach all outputs of its chunk, and gradients everywhere.
    """
    one_token = inputs[0].shape[1] == 1
    if backend == "kernel" and not one_token:
        return kernel(inputs, initial_state, chunk_size)
    with without_autocast(initial_state.device.type):
        wide = [t.to(initial_state.dtype) for t in inputs]
        if one_token:
            y, final_state = step(wide, initial_state, initial_state if in_place else None)
        else:
            y, final_state = chunked(wide, initial_state, chunk_size)
    return y.to(inputs[0].dtype), final_state


def backward_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an `autograd.Function`, with autocast off and a second derivative that is refused."""
    once = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, gradient: Tensor, *others: Tensor) -> Any:
        with without_autocast(gradient.device.type):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                gradient = gradient.detach().requires_grad_()  # else it would be 0 where this is constant
            return once(ctx, gradient, *others)

    return run


class _Context(SimpleNamespace):
    """Of an `autograd.Function` whose forward and backward are called by themselves."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def chunked_scan(function: Any, *rule: type) -> Callable[..., tuple[Tensor, Tensor]]:
    """`function.apply(*rule, chunk_size, initial_state, *inputs)`, for torch.compile and torch.export one operator.

    They would unroll the loops over chunks, for minutes and for one length. The operator keeps its inputs only, and
    runs the forward pass again in its backward pass.

    Args:
        function: An `autograd.Function` that takes the state before the first token and inputs, and gives outputs, of
            the shape of the first input, and the state after the last token, both contiguous. Its `backward` gives
            the gradients of all arguments, None for those before the state.
        rule: What the function takes first, if anything.
    """
    name = f"{OPERATORS}::{function.__name__}" + "".join(f"_{part.__name__}" for part in rule)

    def run(tensors: list[Tensor], chunk_size: int) -> tuple[Tensor, Tensor]:
        y, final_state = function.forward(_Context(), *rule, chunk_size, *tensors)
        return y, final_state

    def run_back(grad_y: Tensor, grad_final: Tensor, tensors: list[Tensor], chunk_size: int) -> list[Tensor]:
        context = _Context()
        with torch.no_grad(), without_autocast(grad_y.device.type):
            function.forward(context, *rule, chunk_size, *tensors)
            return list(function.backward(context, grad_y, grad_final)[len(rule) + 1 :])

    def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        tensors, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx, grad_y, grad_final):  # type: ignore[no-untyped-def]
        return backward_operator(grad_y, grad_final, list(ctx.saved_tensors), ctx.chunk_size), None

    operator = torch.library.custom_op(name, run, mutates_args=())
    backward_operator = torch.library.custom_op(f"{name}_backward", run_back, mutates_args=())
    operator.register_fake(_empty_results)
    backward_operator.register_fake(_empty_gradients)
    operator.register_autograd(backward, setup_context=keep)

    def scan(chunk_size: int, initial_state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return operator([initial_state, *inputs], chunk_size)
        return function.apply(*rule, chunk_size, initial_state, *inputs)

    return scan


def _empty_results(tensors: list[Tensor], chunk_size: int) -> tuple[Tensor, Tensor]:
    state, first, *_ = tensors
    return first.new_empty(first.shape), state.new_empty(state.shape)


def _empty_gradients(grad_y: Tensor, grad_final: Tensor, tensors: list[Tensor], chunk_size: int) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in tensors]


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """`torch.autocast(device_type, enabled=False)`, or nothing where it is off already, which is many times faster."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def decayed_and_written(state: Tensor, decay: Tensor, value: Tensor, key: Tensor, out: Tensor | None) -> Tensor:
    """`state * decay + value * key`, all of them broadcast; in `out`, if there is one."""
    if out is None:
        return (state * decay).addcmul_(value, key)
    return torch.mul(state, decay, out=out).addcmul_(value, key)


def read_out(state: Tensor, query: Tensor) -> Tensor:
    """Sums over N of a state (B, ..., P, N) times a query (B, ..., N): (B, ..., P)."""
    if torch.is_grad_enabled():  # a backward pass inside autocast would round the gradients of matrix products
        return (state * query[..., None, :]).sum(-1)
    # no memory of the size of a state; with the query on the right it would be several times slower on a CPU
    return (query[..., None, :] @ state.mT)[..., 0, :]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H_kv, N) to (B, T, H, N): each head is repeated for H / H_kv consecutive heads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def even_blocks(length: int, size: int) -> list[slice]:
    """Cut a length into blocks of about `size`, all of one size but the last: 65 are one block of 65, not 64 + 1."""
    even = -(-length // max(1, round(length / size)))
    return [slice(start, min(start + even, length)) for start in range(0, length, even)]


def scan_in_blocks(
    scan: Callable[..., tuple[Tensor, Tensor]],
    over_time: Sequence[Tensor],
    initial_state: Tensor,
    rows: int,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    """Call `scan(*over_time, state)` for at most `rows` rows and `tokens` tokens at once, the state carried along."""
    batch, length = over_time[0].shape[:2]
    outputs, finals = [], []
    for row in range(0, batch, rows):
        state, row_outputs = initial_state[row : row + rows], []
        for start in range(0, length, tokens):
            y, state = scan(*(t[row : row + rows, start : start + tokens] for t in over_time), state)
            row_outputs.append(y)
        outputs.append(_join(row_outputs, 1))
        finals.append(state)
    return _join(outputs, 0), _join(finals, 0)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
