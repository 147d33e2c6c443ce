"""Mamba-2 with a state as argument and result, on the parameter names of Transformers.

Glossary (Dao & Gu 2024, arXiv:2405.21060 -> here): Delta -> dt, A -> -exp(A_log), h -> state.recurrent,
heads H of P channels, N state_size, G n_groups.

Different from `transformers.models.mamba2`: the mixer takes and returns a `LayerState`, takes right-padded
rows, and computes convolution and recurrence in full precision (the kernels in their own).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus
from transformers import initialization as init

from .configuration_stateful_mamba2 import StatefulMamba2Config
from .layers_conv import CausalConv1d, causal_conv1d_fn, token_blocks
from .layers_mamba import MixerBackbone, init_mamba_mixer
from .layers_mamba2_kernel import Mamba2Sizes, fused_mamba2, takes
from .layers_mixer import ScanMixer
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_backends import ScanBackend, backward_once
from .scan_ssd import mamba_chunk_scan_combined, scan_ssd
from .state_value import LayerShape, LayerState, state_dtype

NO_LIMIT = (0.0, math.inf)  # of step sizes, which softplus makes positive
KERNEL_AVAILABLE = mamba_chunk_scan_combined is not None and causal_conv1d_fn is not None


class GatedRMSNorm(nn.Module):
    """`RMSNorm(x * silu(gate))` over groups of channels, statistics in float32 or better."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.shape[1] == 1 and not torch.is_grad_enabled():
            return _normed(x, gate, self.weight, self.groups, self.eps)
        return _GatedRMSNorm.apply(x, gate, self.weight, self.groups, self.eps)


class _GatedRMSNorm(torch.autograd.Function):
    """With v = x silu(gate), n = v / rms(v) in each group: y = weight n.

    dv = (dn - n mean(dn n)) / rms(v). Keeps only the inputs, and goes block by block of tokens, so that the passes
    over a block find it in the cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.groups, ctx.eps = groups, eps
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
        for block in token_blocks(x):
            y[:, block] = _normed(x[:, block], gate[:, block], weight, groups, eps)
        return y

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
        grad_weight = torch.zeros_like(weight, dtype=state_dtype(weight.dtype))  # a sum over blocks
        for block in token_blocks(x):
            wide_gate = _widen(gate[:, block])
            swish = silu(wide_gate)
            v, inverse_rms = _gate(x[:, block], swish, ctx.groups, ctx.eps)
            n = v.mul_(inverse_rms)
            wide_grad_y = _widen(grad_y[:, block])
            grad_weight += (wide_grad_y * n.flatten(-2)).sum((0, 1))
            grad_n = (wide_grad_y * weight).unflatten(-1, (ctx.groups, -1))
            grad_v = grad_n.addcmul_(n, (grad_n * n).mean(-1, keepdim=True), value=-1).mul_(inverse_rms).flatten(-2)
            grad_x[:, block] = grad_v * swish
            grad_gate[:, block] = torch.ops.aten.silu_backward(grad_v * x[:, block], wide_gate)
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None


def _normed(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """y, with nothing saved."""
    v = x * silu(_widen(gate))
    n = rms_norm(v.view(*v.shape[:-1], groups, -1), (v.shape[-1] // groups,), None, eps)  # unflatten is slow
    return weight * n.flatten(-2).to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(state_dtype(x.dtype))


def _gate(x: Tensor, swish: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """v and 1 / rms(v) of each group, (B, Q, G, C / G) and (B, Q, G, 1)."""
    v = (x * swish).unflatten(-1, (groups, -1))
    return v, torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def after_input_projection(
    mixer: Any,
    zxbcdt: Tensor,
    convolve: Callable[..., tuple[Tensor, Tensor]],
    norm: nn.Module | None,
    sizes: Mamba2Sizes,
    state: LayerState,
    rows: Rows | None,
    backend: ScanBackend,
) -> tuple[Tensor, LayerState]:
    """The outputs of a Mamba-2 mixer, (B, T, D), and the state after the tokens.

    Args:
        mixer: With `conv1d`, `dt_bias`, `A_log`, `D` and `out_proj`.
        zxbcdt: Output of the input projection, (B, T, 2 I + 2 G N + H) with I = H P inner channels.
        convolve: The convolution with its activation.
        norm: The gated norm; None for y silu(gate) without one.
        sizes, state, rows, backend: Of the mixer, and as layers get them.
    """
    wide = state.recurrent.dtype
    A, D = -mixer.A_log.to(wide).exp(), mixer.D.to(wide)
    unwatched = mixer.scans_unwatched and mixer.scan is scan_ssd
    if backend == "kernel" and unwatched and takes(zxbcdt, rows, sizes, (mixer.conv1d, norm)):
        return fused_mamba2(mixer, zxbcdt, A, D, norm, sizes, state, rows)
    gate, xBC, dt = zxbcdt.split(sizes.parts, -1)
    xBC, conv_state = convolve(xBC, state.conv, rows, backend)
    x, B, C = sizes.scanned(xBC)
    dt = softplus(dt.to(wide) + mixer.dt_bias.to(wide))
    if (sizes.least, sizes.largest) != NO_LIMIT:
        dt = dt.clamp(sizes.least, sizes.largest)
    inputs = x, zero_past_end(dt, rows), A, B, C, D
    options: dict[str, Any] = {"chunk_size": sizes.chunk_size} if backend == "kernel" else {}
    y, state = mixer.advance(*inputs, state=state, rows=rows, backend=backend, **options)
    y = y.flatten(2) * silu(gate) if norm is None else norm(y.flatten(2), gate)
    return mixer.out_proj(y.to(zxbcdt.dtype)), state._replace(conv=conv_state)


class StatefulMamba2Mixer(ScanMixer):
    """Projections, short convolution, SSD recurrence, gated norm.

    Parameters are named and laid out as in `transformers` and mamba-ssm: `in_proj` rows are [z, x, B, C, dt].
    """

    scan = staticmethod(scan_ssd)
    grows = "state_size"

    def __init__(self, config: StatefulMamba2Config, layer: int) -> None:
        super().__init__(config, KERNEL_AVAILABLE)
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.state_size = config.state_size_of(layer)
        self.n_groups = config.n_groups
        inner, bc = config.num_heads * config.head_dim, config.n_groups * self.state_size
        self.inner_size = inner
        self.conv_size = inner + 2 * bc
        self.in_proj = nn.Linear(config.hidden_size, inner + self.conv_size + config.num_heads, bias=config.use_bias)
        self.conv1d = CausalConv1d.depthwise(self.conv_size, config.conv_kernel, config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.D = nn.Parameter(torch.empty(config.num_heads))
        self.norm = GatedRMSNorm(inner, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N) and (H*P + 2*G*N, K-1)."""
        return LayerShape(
            (self.num_heads, self.head_dim, self.state_size), (self.conv_size, self.config.conv_kernel - 1)
        )

    @property
    def conv_parts(self) -> dict[str, int]:
        """x, B and C."""
        bc = self.n_groups * self.state_size
        return {"x": self.inner_size, "B": bc, "C": bc}

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        least, largest = self.config.time_step_limit
        of_scan = self.n_groups, self.state_size, self.config.chunk_size, least, largest
        of_norm = self.inner_size // self.n_groups, self.norm.eps
        sizes = Mamba2Sizes(self.num_heads, self.head_dim, *of_scan, *of_norm)
        zxbcdt, backend = self.in_proj(hidden_states), self.backend_for(hidden_states)
        return after_input_projection(self, zxbcdt, self.conv1d, self.norm, sizes, state, rows, backend)

    @torch.no_grad()
    def init_weights(self) -> None:
        """A = -(1..H) as in Transformers, or U(-16, -1) as in mamba-ssm; and see `init_mamba_mixer`."""
        if self.config.initialization == "mamba-ssm":
            rates = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16)
        else:
            rates = torch.arange(1, self.num_heads + 1, device=self.A_log.device, dtype=torch.float32)
        init.copy_(self.A_log, rates.log())
        init_mamba_mixer(self, self.config, self.dt_bias)


class StatefulMamba2Model(MixerBackbone):
    config_class = StatefulMamba2Config
    mixer_class = StatefulMamba2Mixer


class StatefulMamba2ForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulMamba2Model
