"""What code launches on a GPU, found on a CPU: kernels of Triton are noted in place of being run.

Results are memory as it was found: shapes and dtypes are right, values are not, and nothing here may read one.
Import this before triton, mamba_ssm, fla and the package, in a process of its own.

    what is written in CUDA   one launch in each direction (causal-conv1d, selective_scan_cuda)
    rms_norm of torch         one in each direction, as on a GPU; on a CPU it is ten operators
    settings to tune          the middle one of those that Triton would try
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

# Neither kernels nor views; reading a number waits, and launches a copy at most.
NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "_local_scalar_dense", "is_same_size", "_reshape_alias", "item")
MULTIPROCESSORS = 132
"""Of an H200: it decides how many partial sums a norm keeps."""


class KernelCall(NamedTuple):
    """A launch of a kernel of Triton: its function, and everything that it was called with, settings included."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Launches(TorchDispatchMode):
    """Counts what is launched inside: `names` of all, `kernels` those of Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.kernels: list[KernelCall] = []
        self.silent = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = function._schema.name.split("::")
        if space != "aten":  # an operator of ours: what it is made of counts
            with self:
                return OPDEFS[function._schema.name]._init_fn(*args, **(kwargs or {}))
        views = any(part.alias_info is not None and not part.alias_info.is_write for part in function._schema.returns)
        if not (self.silent or views or name.removesuffix("_like").removesuffix("_strided") in NO_KERNEL):
            self.names[name] += 1
        if name in ("mm", "bmm", "addmm"):  # slow in bfloat16 on a CPU
            left, right = args[-2:]
            return left.new_empty(*left.shape[:-1], right.shape[-1])
        return function(*args, **(kwargs or {}))


OPEN: list[Launches] = []


@contextmanager
def counted() -> Iterator[Launches]:
    """What is launched inside."""
    OPEN.append(Launches())
    try:
        with OPEN[-1]:
            yield OPEN[-1]
    finally:
        OPEN.pop()


@contextmanager
def one_launch(name: str) -> Iterator[None]:
    """Count one launch, whatever operators of torch are called inside."""
    for counter in OPEN:
        counter.names[name] += not counter.silent
        counter.silent += 1
    try:
        yield
    finally:
        for counter in OPEN:
            counter.silent -= 1


def _note(executor: Any, *arguments: Any, **options: Any) -> None:
    """In place of `GridExecutor.__call__` of Triton's interpreter."""
    for counter in OPEN:
        counter.names[f"triton {executor.fn.__name__}"] += 1
        counter.kernels.append(KernelCall(executor.fn, arguments, options))


def conv_forward(x: Tensor, weight: Any, bias: Any, seq_idx: Any, initial: Any, final: Any, activation: bool) -> Any:
    with one_launch("causal_conv1d_fwd"):
        return torch.empty_like(x)


def conv_backward(
    x: Tensor,
    weight: Any,
    bias: Any,
    dout: Any,
    seq_idx: Any,
    initial: Any,
    dfinal: Any,
    dx: Any,
    states: bool,
    _: Any,
) -> tuple[Any, ...]:
    with one_launch("causal_conv1d_bwd"):
        like = (torch.empty_like(x) if dx is None else dx, weight, bias, initial if states else None)
        return like[0], *(None if t is None else torch.zeros_like(t) for t in like[1:])


def selective_forward(u: Tensor, delta: Any, A: Tensor, B: Any, C: Any, D: Any, z: Any, *_: Any) -> list[Tensor]:
    """Outputs, the state after each 2,048 tokens with the decay up to it, and gated outputs (selective_scan.cpp)."""
    batch, channels, length = u.shape
    with one_launch("selective_scan_fwd"):
        states = u.new_zeros(batch, channels, -(-length // 2048), 2 * A.shape[1], dtype=torch.float32)
        return [torch.empty_like(delta), states, *([] if z is None else [torch.empty_like(z)])]


def selective_backward(
    u: Tensor,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    z: Any,
    bias: Any,
    dout: Any,
    x: Any,
    out: Any,
    dz: Any,
    *_: Any,
) -> list[Any]:
    with one_launch("selective_scan_bwd"):
        found = [None if t is None else torch.zeros_like(t) for t in (u, delta, A, B, C, D, bias)]
        return found + ([] if z is None else [torch.zeros_like(z) if dz is None else dz, torch.zeros_like(z)])


class _RMSNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm` of a GPU, which keeps its input and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        with one_launch("rms_norm"):
            ctx.save_for_backward(x, x.new_zeros(*x.shape[:-1], 1, dtype=torch.float32), weight)
            return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, _, weight = ctx.saved_tensors
        with one_launch("rms_norm_backward"):
            return torch.zeros_like(x), None if weight is None else torch.zeros_like(weight)


def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, weight)


def _middle(tuner: Any, *arguments: Any, config: Any, **options: Any) -> float:
    """In place of a measured time, of which the smallest wins: how far from the middle of what is tried."""
    tried = [str(c) for c in tuner.prune_configs(options)]
    return abs(tried.index(str(config)) - len(tried) // 2)


def stand_in_for_a_gpu() -> None:
    """Let kernels be noted, and what is written in CUDA be counted."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import GridExecutor

    import tests.kernels.interpreter as interpreter

    interpreter.causal_conv1d_fwd_function = conv_forward  # type: ignore[assignment]
    interpreter.causal_conv1d_bwd_function = conv_backward  # type: ignore[assignment]
    interpreter.stand_in_for_a_gpu()
    GridExecutor.__call__ = _note
    Autotuner._bench = _middle
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)  # type: ignore[assignment,misc]
    torch.nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
    scans: Any = sys.modules["selective_scan_cuda"]
    sys.modules["causal_conv1d"].causal_conv1d_update = None  # type: ignore[attr-defined]  # mamba_ssm asks for both
    scans.fwd, scans.bwd = selective_forward, selective_backward
    from hf_recurrent_lengthgen.models import layers_mixer

    resolve = layers_mixer.resolve_backend
    layers_mixer.resolve_backend = lambda setting, _, *rest: resolve(setting, "cuda", *rest)  # type: ignore[assignment]
