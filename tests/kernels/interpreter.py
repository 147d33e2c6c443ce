"""What Triton's interpreter needs to run the kernels of mamba-ssm and fla on a CPU: `stand_in_for_a_gpu`.

The interpreter is chosen when triton is imported: set TRITON_INTERPRET=1 and call this before mamba_ssm and fla are
imported, in a process of its own. causal-conv1d, which is written in CUDA, is replaced by its definition in torch.
"""

import contextlib
import importlib.machinery
import math
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu


def stand_in_for_a_gpu() -> None:
    """The smallest tuning configuration, no CUDA device, bfloat16 products as floats instead of bit patterns, masks
    as booleans where one number met a block, scans slice by slice, and causal-conv1d in torch.

    Loop counters are tensors, as in a compiled kernel; the interpreter leaves them Python integers.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    builder = interpreter.InterpreterBuilder
    create_dot, launch = builder.create_dot, interpreter.GridExecutor.__call__
    load = builder.create_masked_load

    def smallest(tuner: Any, *arguments: Any, config: Any, **options: Any) -> float:
        return math.prod(config.kwargs.values())

    def widen(value: Any) -> Any:
        if value.dtype != tl.bfloat16:
            return value
        bits = value.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

    def load_under_booleans(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        return load(self, pointers, mask, *others)

    def scan_slices(self: Any, inputs: Any) -> Any:
        data = [numpy.moveaxis(part.handle.data, self.axis, 0) for part in inputs]
        found = [numpy.empty_like(part) for part in data]
        state = [self.to_tensor(part[0], tensor.dtype) for part, tensor in zip(data, inputs, strict=True)]
        for i in range(len(data[0])):
            if i:
                now = [self.to_tensor(part[i], tensor.dtype) for part, tensor in zip(data, inputs, strict=True)]
                state = self.combine_fn.fn(*state, *now)
            for part, value in zip(found, state, strict=True):
                part[i] = value.handle.data
        return [
            self.to_tensor(numpy.ascontiguousarray(numpy.moveaxis(part, 0, self.axis)), tensor.dtype)
            for part, tensor in zip(found, inputs, strict=True)
        ]

    def counted(*bounds: Any) -> Any:
        return map(interpreter._implicit_cvt, range(*map(int, bounds)))

    def launch_with_tensor_counters(executor: Any, *arguments: Any, **options: Any) -> None:
        names = executor.fn.__globals__
        names["range"] = counted
        try:
            launch(executor, *arguments, **options)
        finally:
            del names["range"]

    Autotuner._bench = smallest
    interpreter.ScanOps.generic_scan = scan_slices
    interpreter.GridExecutor.__call__ = launch_with_tensor_counters
    builder.create_masked_load = load_under_booleans
    builder.create_dot = lambda self, a, b, *rest: create_dot(self, widen(a), widen(b), *rest)
    gpu: Any = torch.cuda
    gpu.device = contextlib.nullcontext
    gpu.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=4)
    sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
    whole, functions = types.ModuleType("causal_conv1d"), types.ModuleType("causal_conv1d.cpp_functions")
    whole.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    whole.__spec__ = importlib.machinery.ModuleSpec("causal_conv1d", None)
    functions.causal_conv1d_fwd_function = causal_conv1d_fwd_function  # type: ignore[attr-defined]
    functions.causal_conv1d_bwd_function = causal_conv1d_bwd_function  # type: ignore[attr-defined]
    functions.causal_conv1d_update_function = None  # type: ignore[attr-defined]
    sys.modules |= {"causal_conv1d": whole, "causal_conv1d.cpp_functions": functions}


# causal-conv1d 1.6.1 (causal_conv1d/cpp_functions.py, csrc/causal_conv1d.cpp): signatures, checks and dtypes.


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """x (B, C, T) with the channels last in memory, weight (C, K), states (B, C, K - 1)."""
    _check(x, weight, bias, initial_states, final_states_out)
    assert seq_idx is None
    if final_states_out is not None:
        final_states_out.copy_(_with_history(x, weight, initial_states)[..., x.shape[2] :])
    out = _convolved(x, weight, bias, initial_states, silu_activation)
    return torch.empty_like(x).copy_(out)


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, which is written to `dx` where that is present, of weight, bias and initial states."""
    _check(x, weight, bias, initial_states, dfinal_states, dout, dx)
    assert seq_idx is None
    wide, length = weight.float(), x.shape[2]
    inputs = _with_history(x, weight, initial_states).float()
    da = dout.float()
    if silu_activation:
        da = torch.ops.aten.silu_backward(da, _convolved(x, weight, bias, initial_states, False))
    d_inputs, d_weight = torch.zeros_like(inputs), torch.zeros_like(wide)
    for tap in range(weight.shape[1]):
        d_inputs[..., tap : tap + length] += da * wide[:, tap, None]
        d_weight[:, tap] = (da * inputs[..., tap : tap + length]).sum((0, 2))
    if dfinal_states is not None:
        d_inputs[..., length:] += dfinal_states.float()
    d_states, d_x = d_inputs.split([weight.shape[1] - 1, length], -1)
    dx = torch.empty_like(x) if dx is None else dx
    dx.copy_(d_x)
    d_bias = None if bias is None else da.sum((0, 2)).to(bias.dtype)
    return (
        dx,
        d_weight.to(weight.dtype),
        d_bias,
        d_states.to(x.dtype).mT.contiguous().mT if return_dinitial_states else None,
    )


def _with_history(x: Tensor, weight: Tensor, states: Tensor | None) -> Tensor:
    states = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if states is None else states
    return torch.cat([states.to(x.dtype), x], -1)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, activation: bool) -> Tensor:
    wide = None if bias is None else bias.float()
    out = conv1d(_with_history(x, weight, states).float(), weight.float()[:, None], wide, groups=len(weight))
    return silu(out) if activation else out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, *like_x: Tensor | None) -> None:
    batch, channels, length = x.shape
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert len(weight) == channels
    assert bias is None or (bias.dtype, bias.shape) == (weight.dtype, (channels,))
    assert 2 <= weight.shape[1] <= 4
    assert channels % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert x.stride(2) > 1
    for t in (x, *like_x):
        if t is not None:
            assert t.stride(1) == 1, "the channels must be last in memory"
            assert (t.dtype, *t.shape[:2]) == (x.dtype, batch, channels)
            assert t.shape[2] in (length, weight.shape[1] - 1)


class _CausalConv1dFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, states: Any, activation: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias, states)
        ctx.activation = activation
        return causal_conv1d_fwd_function(x, weight, bias, None, states, None, activation)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight, bias, states = ctx.saved_tensors
        dout = dout if dout.stride(1) == 1 else dout.mT.contiguous().mT
        initial = states is not None
        found = causal_conv1d_bwd_function(x, weight, bias, dout, None, states, None, None, initial, ctx.activation)
        return *found, None


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Any = None, *, initial_states: Any = None, activation: str | None = None
) -> Tensor:
    return _CausalConv1dFn.apply(x, weight, bias, initial_states, activation in ("silu", "swish"))
