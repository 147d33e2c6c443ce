"""What Triton's interpreter needs to run the kernels of mamba-ssm and fla on a CPU: `stand_in_for_a_gpu`.

The interpreter is chosen when triton is imported: set TRITON_INTERPRET=1 and call this before mamba_ssm and fla are
imported, in a process of its own.
"""

import contextlib
import math
import sys
import types
from typing import Any

import torch


def stand_in_for_a_gpu() -> None:
    """The smallest tuning configuration, no CUDA device, bfloat16 products as floats instead of bit patterns.

    Loop counters are tensors, as in a compiled kernel; the interpreter leaves them Python integers.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    builder = interpreter.InterpreterBuilder
    create_dot, launch = builder.create_dot, interpreter.GridExecutor.__call__

    def smallest(tuner: Any, *arguments: Any, config: Any, **options: Any) -> float:
        return math.prod(config.kwargs.values())

    def widen(value: Any) -> Any:
        if value.dtype != tl.bfloat16:
            return value
        bits = value.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

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
    interpreter.GridExecutor.__call__ = launch_with_tensor_counters
    builder.create_dot = lambda self, a, b, *rest: create_dot(self, widen(a), widen(b), *rest)
    gpu: Any = torch.cuda
    gpu.device = contextlib.nullcontext
    gpu.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=4)
    sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
