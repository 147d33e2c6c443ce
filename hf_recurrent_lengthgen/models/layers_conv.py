"""Short causal depthwise convolution, with SiLU or not, that starts from any state and returns the next one.

    a_t = bias + sum_k weight_k x_{t - (K-1) + k},  y_t = silu(a_t) or a_t

The inputs before the first token are the convolution state: the last K-1 inputs, oldest first.

Shape suffixes: B batch, T time, C channels, K taps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from .layers_mixer import ScanMixer
from .rows import Rows
from .rows_moved import inputs_around
from .scan_backends import INSTALL_HINT, ScanBackend, backward_once, logger
from .scan_fla_kernels import fla_kernel
from .state_value import LayerShape

fla_causal_conv1d = fla_kernel("fla.modules.causal_conv1d", "causal_conv1d")


def _convolve_with_fla(x: Tensor, weight: Tensor, bias: Any, initial_states: Tensor, activation: Any) -> Tensor:
    """As causal-conv1d's, by fla's, which needs no nvcc; its states have a first column that no tap meets."""
    state = pad(initial_states, (1, 0))
    return fla_causal_conv1d(x.mT, weight, bias, initial_state=state, activation=activation, backend="triton")[0].mT


try:
    from causal_conv1d import causal_conv1d_fn
except ImportError:
    causal_conv1d_fn = None if fla_causal_conv1d is None else _convolve_with_fla

_KERNEL_MAX_ELEMENTS = 2**31
_BLOCK_ELEMENTS = 2**20  # 4 MiB in float32


class CausalConv1d(nn.Conv1d):
    """`causal_conv` on the parameter names of `nn.Conv1d`; called as a module, so that the hooks of offloading run."""

    activation = True

    @classmethod
    def depthwise(cls, channels: int, taps: int, bias: bool, activation: bool = True) -> "CausalConv1d":
        """One with its own taps for each channel; not the constructor, which PEFT calls as that of `nn.Conv1d`."""
        conv = cls(channels, channels, taps, groups=channels, padding=taps - 1, bias=bias)
        conv.activation = activation
        return conv

    def forward(  # type: ignore[override]
        self, x: Tensor, initial_state: Tensor, rows: Rows | None = None, backend: ScanBackend = "torch"
    ) -> tuple[Tensor, Tensor]:
        """See `causal_conv`."""
        return causal_conv(x, self.weight.squeeze(1), self.bias, initial_state, rows, backend, self.activation)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor,
    rows: Rows | None = None,
    backend: ScanBackend = "torch",
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """Convolve, and apply SiLU unless `activation` is false.

    Args:
        x: Inputs, (B, T, C).
        weight: Taps, (C, K); the last one meets the current token.
        bias: (C,) or None.
        initial_state: The K-1 inputs before the first token, (B, C, K-1).
        rows: As layers get them (`Rows`). Padding does not enter the returned state.
        backend: "torch" or "kernel" (causal-conv1d, or fla's where that is not installed).
        activation: Whether SiLU follows.

    Returns:
        Outputs (B, T, C) in the dtype of `x`, and the state after the last real token in the dtype of
        `initial_state`, (B, C, K-1).
    """
    dtype = initial_state.dtype
    if x.shape[1] == 1 and rows is None:
        inputs = torch.cat([initial_state.mT, x.to(dtype)], dim=1)  # (B, K, C): as x, the channels are last in memory
        a = (inputs * weight.mT.to(dtype)).sum(1)
        a = a if bias is None else a + bias.to(dtype)
        return (silu(a) if activation else a)[:, None].to(x.dtype), inputs[:, 1:].clone().mT
    initial_state, final_state = inputs_around([x], initial_state, rows)
    if backend == "kernel" and causal_conv1d_fn is None:  # of Mamba-1, whose scan needs no package
        backend = "torch"
        if not torch.compiler.is_compiling():
            logger.warning_once(
                "Short convolutions run in torch, which takes time and memory: neither causal-conv1d nor "
                f"flash-linear-attention is installed ({INSTALL_HINT})."
            )
    if backend == "kernel":
        y = _convolve_with_kernel(x, weight, bias, initial_state, activation)
    else:
        bias = x.new_zeros(x.shape[2]) if bias is None else bias
        y = _CausalConv.apply(x, weight.to(dtype), bias.to(dtype), initial_state, activation)
    return y, final_state


def _convolve_with_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor, activation: bool
) -> Tensor:
    """Outputs of causal-conv1d, (B, T, C). It takes 2 to 4 taps, C a multiple of 8 and no float64."""
    batch, length, _ = x.shape
    # the kernel reads 16 bytes at once; clone, since contiguous() keeps odd strides at B = T = 1
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8 or x.storage_offset() % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    # the kernel computes addresses in 32 bits and is silently wrong beyond: halves
    if batch > 1 and batch * x.stride(0) > _KERNEL_MAX_ELEMENTS:
        half = batch // 2
        halves = [(x[:half], initial_state[:half]), (x[half:], initial_state[half:])]
        return torch.cat([_convolve_with_kernel(part, weight, bias, state, activation) for part, state in halves])
    if length * x.stride(1) > _KERNEL_MAX_ELEMENTS:
        half = length // 2
        halves = [(x[:, :half], initial_state), (x[:, half:], x[:, half - initial_state.shape[2] : half].mT)]
        return torch.cat(
            [_convolve_with_kernel(part, weight, bias, state, activation) for part, state in halves], dim=1
        )
    # with a state, channels must be contiguous in both
    state = initial_state.to(x.dtype).mT.contiguous().mT
    return causal_conv1d_fn(x.mT, weight, bias, initial_states=state, activation="silu" if activation else None).mT


class _CausalConv(torch.autograd.Function):
    """Convolution and perhaps SiLU; keeps only the inputs and recomputes a_t in the backward pass.

    Both directions go block by block over time, so that the passes over a block find it in the cache. A block is
    read as `span`: the K-1 inputs before it and its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor, activation: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias, initial_state)
        ctx.activation = activation
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for block in token_blocks(x):
            a = _convolve(_span(x, block, initial_state), weight, bias)
            y[:, block] = silu(a, inplace=True) if activation else a
        return y

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial_state = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        grad_history = torch.zeros_like(initial_state.mT)  # of the K-1 inputs before the block that follows
        for block in reversed(token_blocks(x)):
            span = _span(x, block, initial_state)
            grad_a = grad_y[:, block].to(span.dtype)
            if ctx.activation:
                grad_a = torch.ops.aten.silu_backward(grad_a, _convolve(span, weight, bias))
            length = grad_a.shape[1]
            grad_span = torch.zeros_like(span)
            grad_span[:, length:] = grad_history
            for k, tap in enumerate(weight.unbind(1)):
                grad_span[:, k : k + length].addcmul_(grad_a, tap)
                grad_weight[:, k] += (grad_a * span[:, k : k + length]).sum((0, 1))
            grad_bias += grad_a.sum((0, 1))
            history = grad_history.shape[1]
            grad_history, grad_x[:, block] = grad_span[:, :history], grad_span[:, history:]
        return grad_x, grad_weight, grad_bias, grad_history.mT, None


def token_blocks(x: Tensor) -> list[slice]:
    """Cut the T tokens of x (B, T, C) into blocks that fit into the cache of a CPU; one block elsewhere."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # else a loop, unrolled for one length
        return [slice(0, x.shape[1])]
    tokens = max(1, _BLOCK_ELEMENTS // (x.shape[0] * x.shape[2]))
    return [slice(start, min(start + tokens, x.shape[1])) for start in range(0, x.shape[1], tokens)]


def _span(x: Tensor, block: slice, initial_state: Tensor) -> Tensor:
    """The inputs of a block and the K-1 before it, (B, K-1+Q, C), in the dtype of the state."""
    history = initial_state.shape[2]
    before = x[:, max(0, block.start - history) : block.stop].to(initial_state.dtype)
    missing = max(0, history - block.start)
    return torch.cat([initial_state.mT[:, history - missing :], before], dim=1) if missing else before


def _convolve(span: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """a_t of a block, (B, Q, C), from its span (B, K-1+Q, C)."""
    taps = weight.shape[1]
    length = span.shape[1] - taps + 1
    a = torch.addcmul(bias, span[:, :length], weight[:, 0])
    for k in range(1, taps):
        a.addcmul_(span[:, k : k + length], weight[:, k])
    return a


class ShortConvMixer(ScanMixer):
    """Base of mixers with a convolution behind each projection to queries, keys and values, if `use_short_conv`.

    A subclass sets `heads` H, `key_dim` N and `value_dim` P, and calls `add_convolutions`.
    """

    heads: int
    key_dim: int
    value_dim: int

    def add_convolutions(self, silu: str, **channels: int) -> None:
        """`{name}_conv1d` with so many channels for the names of the projections to q, k and v; `silu` has those of
        them that SiLU follows."""
        self.convolved = channels
        for name, width in channels.items() if self.config.use_short_conv else ():
            convolution = CausalConv1d.depthwise(width, self.config.conv_size, bias=False, activation=name in silu)
            self.add_module(f"{name}_conv1d", convolution)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N), and with convolutions (channels of q, k and v, K-1)."""
        conv = (sum(self.conv_parts.values()), self.config.conv_size - 1) if self.config.use_short_conv else (0,)
        return LayerShape((self.heads, self.value_dim, self.key_dim), conv)

    @property
    def conv_parts(self) -> dict[str, int]:
        """q, k and v."""
        return dict(zip("qkv", self.convolved.values(), strict=True)) if self.config.use_short_conv else {}

    def convolve(
        self, inputs: list[Tensor], state: Tensor, rows: Rows | None, backend: ScanBackend
    ) -> tuple[list[Tensor], Tensor]:
        """Convolve the three; their states stand one below the other in `state`, (B, C, K-1)."""
        if not self.config.use_short_conv:
            return inputs, state
        after = None
        if rows is not None and rows.group is not None:
            state, after = inputs_around(inputs, state, rows)
            rows = None if rows.real is None else Rows(rows.shape, rows.real)
        states = state.split([x.shape[2] for x in inputs], dim=1)
        results = [
            self.get_submodule(f"{name}_conv1d")(x, part, rows, backend)
            for name, x, part in zip(self.convolved, inputs, states, strict=True)
        ]
        return [y for y, _ in results], torch.cat([part for _, part in results], dim=1) if after is None else after
