"""The Mamba-2 mixer between its projections as one operation on kernels of mamba-ssm and causal-conv1d.

    z, xBC, dt = zxbcdt;  x, B, C = silu(conv(xBC));  y = scan(x, softplus(dt + dt_bias), A, B, C, D);  RMSNorm(y silu(z))

mamba-ssm's own fused path (`MambaSplitConv1dScanCombinedFn`) has no state of the convolution. This one takes the states
of convolution and scan and returns both, with all gradients. As theirs, it keeps its input, y and 1 / rms for the
backward pass, which computes the convolution again, and, where the output projection is inside, the normed output.

Shapes: B batch, T time, H heads, P head dim, I = H P inner channels, G groups, N state dim, K taps, C = I + 2 G N
convolved channels, D hidden size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .rows import Rows
from .rows_moved import last_inputs
from .scan_backends import backward_once, without_autocast
from .scan_ssd import kernel_chunk, kernel_piece
from .state_value import LayerState

try:
    from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
    from mamba_ssm.ops.triton.layernorm_gated import _layer_norm_bwd, _layer_norm_fwd
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_bwd, _mamba_chunk_scan_combined_fwd
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True

_PADDING = -1e4  # a raw step size whose softplus and gradient are 0, whatever the bias
_NORM_MAX_BYTES = 2**16  # of a group of channels, which one block of the kernel of the norm holds


class Mamba2Sizes(NamedTuple):
    """What the weights do not tell.

    Attributes:
        heads: H.
        head_dim: P.
        groups: G.
        state_size: N.
        chunk_size: Tokens of a chunk of the scan.
        limits: Least and largest step size.
        norm_group: Channels over which the norm goes.
        eps: Of the norm.
        norm_before_gate: RMSNorm(y) silu(z) in place of RMSNorm(y silu(z)).
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    chunk_size: int
    limits: tuple[float, float]
    norm_group: int
    eps: float
    norm_before_gate: bool = False

    @property
    def parts(self) -> list[int]:
        """Channels of z, xBC and dt."""
        inner = self.heads * self.head_dim
        return [inner, inner + 2 * self.groups * self.state_size, self.heads]

    def scanned(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, H, P), B and C (B, T, G, N)."""
        x, B, C = xBC.split([self.parts[0], *[self.groups * self.state_size] * 2], -1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        return x, B.unflatten(-1, (self.groups, -1)), C.unflatten(-1, (self.groups, -1))


def takes(zxbcdt: Tensor, rows: Rows | None, sizes: Mamba2Sizes, modules: tuple[nn.Module | None, ...]) -> bool:
    """Whether `fused_mamba2` computes what the modules would: those whose weights it reads, convolution and norm.

    Not: one token, a sequence that processes share, sizes beyond 32-bit addresses, a least step size at padding,
    modules that are more than their weights, compiled graphs (the kernels are not operators of torch).
    """
    if not AVAILABLE or zxbcdt.shape[1] == 1 or torch.compiler.is_compiling() or not all(map(is_plain, modules)):
        return False
    if rows is not None and (rows.group is not None or (rows.real is not None and sizes.limits[0] > 0)):
        return False
    _, xBC, dt = zxbcdt.split(sizes.parts, -1)
    x, B, _ = sizes.scanned(xBC)
    batch, tokens = kernel_piece(x, dt, B, kernel_chunk(sizes.chunk_size))
    fits = zxbcdt.shape[0] <= batch and zxbcdt.shape[1] <= tokens
    return fits and sizes.norm_group * zxbcdt.element_size() <= _NORM_MAX_BYTES


def is_plain(module: Any) -> bool:
    """Whether a module is no more than its weights: without hooks (of offloading, sharding, users), adapters,
    parametrizations, quantized or sharded weights. None is."""
    if module is None:
        return True
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    weights = all(type(weight) in (nn.Parameter, Tensor) for weight in module.parameters(recurse=False))
    return weights and not hooks and "forward" not in vars(module) and not list(module.children())


def fused_mamba2(
    zxbcdt: Tensor,
    conv1d: nn.Conv1d,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    norm: Tensor | None,
    out_proj: nn.Module,
    state: LayerState,
    rows: Rows | None,
    sizes: Mamba2Sizes,
) -> tuple[Tensor, LayerState]:
    """From the input projection to the outputs of the mixer, (B, T, D), and the state after the last real token.

    Args:
        zxbcdt: Output of the input projection, (B, T, 2 I + 2 G N + H).
        conv1d: Its weight is (C, 1, K).
        dt_bias: (H,).
        A: Negative decay rates, (H,).
        D: Skip weights, (H,).
        norm: Weight of the gated norm, (I,); None for y silu(z) without a norm.
        out_proj: Computed inside if it is a plain `nn.Linear`, so that its input need not be kept; else called.
        state: Before the first token, (B, H, P, N) and (B, C, K-1).
        rows: As layers get them.
        sizes: As named.
    """
    inside = type(out_proj) is nn.Linear and is_plain(out_proj)
    lengths = None if rows is None else rows.lengths
    out, recurrent, conv = _FusedMamba2.apply(
        zxbcdt.contiguous(),
        conv1d.weight.squeeze(1),
        conv1d.bias,
        dt_bias,
        A,
        D,
        norm,
        out_proj.weight if inside else None,
        out_proj.bias if inside else None,
        state.recurrent,
        state.conv,
        lengths,
        sizes,
    )
    return (out if inside else out_proj(out)), state._replace(recurrent=recurrent, conv=conv)


class _FusedMamba2(torch.autograd.Function):
    """Arguments as of `fused_mamba2`, with the weights of the output projection, and the real tokens of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        zxbcdt: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        norm: Tensor | None,
        out_weight: Tensor | None,
        out_bias: Tensor | None,
        ssm_state: Tensor,
        conv_state: Tensor,
        lengths: Tensor | None,
        sizes: Mamba2Sizes,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.sizes = sizes
        device = zxbcdt.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else zxbcdt.dtype
        with without_autocast(device):
            z, xBC, dt = zxbcdt.split(sizes.parts, -1)
            before = conv_state.to(xBC.dtype).mT.contiguous().mT  # the kernel takes channels last only
            x, B, C = sizes.scanned(_convolve(xBC, weight, bias, before))
            gate = None if norm is not None else z.unflatten(-1, x.shape[2:])
            gated, y, _, _, _, final = _mamba_chunk_scan_combined_fwd(
                x,
                _without_padding(dt, lengths),
                A,
                B,
                C,
                z=gate,
                initial_states=ssm_state,
                **_scan_options(dt_bias, D, sizes),
            )
            rstd = None
            if norm is not None:
                y = gated
                gated, _, rstd = _layer_norm_fwd(
                    _tokens(y), norm, None, z=zxbcdt.flatten(0, 1)[:, : sizes.parts[0]], **_norm_options(sizes)
                )
            out = gated.view(z.shape)
            if out_weight is not None:
                wide = None if out_bias is None else out_bias.to(ctx.dtype)
                out = linear(out.to(ctx.dtype), out_weight.to(ctx.dtype), wide)
        ctx.save_for_backward(
            zxbcdt, weight, bias, dt_bias, A, D, norm, out_weight, out_bias, ssm_state, before, lengths, y, rstd
        )
        ctx.conv_dtype = conv_state.dtype
        return out, final.to(ssm_state.dtype), last_inputs(xBC, conv_state, lengths)

    @staticmethod
    @backward_once
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None, d_after: Tensor | None) -> tuple[Any, ...]:
        (zxbcdt, weight, bias, dt_bias, A, D, norm, out_weight, out_bias, ssm_state, before, lengths, y, rstd) = (
            ctx.saved_tensors
        )
        sizes, project = ctx.sizes, out_weight is not None
        z, xBC, dt = zxbcdt.split(sizes.parts, -1)
        d_all, d_convolved = torch.empty_like(zxbcdt), torch.empty_like(xBC, memory_format=torch.contiguous_format)
        d_z, d_xBC, d_dt = d_all.split(sizes.parts, -1)
        if d_out is None:
            d_out = z.new_zeros(*z.shape[:2], len(out_weight) if project else z.shape[2])
        d_gated = d_out
        if out_weight is not None:
            d_gated = (d_out.to(ctx.dtype) @ out_weight.to(ctx.dtype)).to(y.dtype)

        x, B, C = sizes.scanned(_convolve(xBC, weight, bias, before))
        d_x, d_B, d_C = sizes.scanned(d_convolved)
        options: dict[str, Any] = _scan_options(dt_bias, D, sizes)
        options |= {
            "dx": d_x,
            "ddt": d_dt,
            "dB": d_B,
            "dC": d_C,
            "dfinal_states": d_final,
            "initial_states": ssm_state,
        }
        d_norm, gated = None, []
        if norm is None:
            heads = x.shape[2:]
            options |= {"z": z.unflatten(-1, heads), "dz": d_z.unflatten(-1, heads), "recompute_output": project}
            d_y = d_gated.contiguous().view_as(y)
        else:
            inner = sizes.parts[0]
            d_y, d_norm, _, _, *gated = _layer_norm_bwd(
                _tokens(d_gated.contiguous()),
                _tokens(y),
                norm,
                None,
                mean=None,
                rstd=rstd,
                z=zxbcdt.flatten(0, 1)[:, :inner],
                dz=d_all.flatten(0, 1)[:, :inner],
                recompute_output=project,
                **_norm_options(sizes),
            )
        _, _, d_A, _, _, d_D, _, d_dt_bias, d_ssm, *scanned = _mamba_chunk_scan_combined_bwd(
            d_y.view_as(y), x, _without_padding(dt, lengths), A, B, C, y, **options
        )
        to = d_xBC if _aligned(d_xBC) else d_convolved.clone()
        _, d_weight, d_bias, d_conv = causal_conv1d_bwd_function(
            _channels_last(xBC), weight, bias, d_convolved.mT, None, before, None, to.mT, True, True
        )
        if to is not d_xBC:
            d_xBC.copy_(to)
        d_conv = d_conv.to(ctx.conv_dtype)
        if d_after is not None:
            _add_to_last_inputs(d_after, d_xBC, d_conv, lengths)
        d_out_weight = d_out_bias = None
        if project:
            (normed,) = gated or scanned
            flat = _tokens(d_out.to(ctx.dtype))
            d_out_weight = (flat.mT @ _tokens(normed).to(ctx.dtype)).to(out_weight.dtype)
            d_out_bias = None if out_bias is None else flat.sum(0, dtype=torch.float32).to(out_bias.dtype)
        of_scan = d_dt_bias.to(dt_bias.dtype), d_A.to(A.dtype), d_D.to(D.dtype)
        of_states = d_ssm.to(ssm_state.dtype), d_conv
        return d_all, d_weight, d_bias, *of_scan, d_norm, d_out_weight, d_out_bias, *of_states, None, None


def _tokens(x: Tensor) -> Tensor:
    """(B, T, ...) to (B T, channels)."""
    return x.reshape(x.shape[0] * x.shape[1], -1) if x.ndim > 2 else x


def _scan_options(dt_bias: Tensor, D: Tensor, sizes: Mamba2Sizes) -> dict[str, Any]:
    chunk = kernel_chunk(sizes.chunk_size)
    return {"chunk_size": chunk, "D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": sizes.limits}


def _norm_options(sizes: Mamba2Sizes) -> dict[str, Any]:
    options = {"group_size": sizes.norm_group, "norm_before_gate": sizes.norm_before_gate, "is_rms_norm": True}
    return {"eps": sizes.eps, **options}


def _without_padding(dt: Tensor, lengths: Tensor | None) -> Tensor:
    """Raw step sizes (B, T, H) that leave the state as it is at padding."""
    if lengths is None:
        return dt
    past_end = torch.arange(dt.shape[1], device=dt.device) >= lengths[:, None]
    return dt.masked_fill(past_end[..., None], _PADDING)


def _aligned(x: Tensor) -> bool:
    """Whether the convolution can read and write x (B, T, C) where it is: it does so in vectors of 8 channels."""
    return not any(number % 8 for number in (x.stride(0), x.stride(1), x.storage_offset()))


def _channels_last(x: Tensor) -> Tensor:
    """(B, T, C) as the convolution takes it, (B, C, T)."""
    return (x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)).mT


def _convolve(xBC: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    """silu(conv(xBC)), (B, T, C)."""
    return causal_conv1d_fwd_function(_channels_last(xBC), weight, bias, None, before, None, True).mT


def _add_to_last_inputs(d_after: Tensor, d_xBC: Tensor, d_conv: Tensor, lengths: Tensor | None) -> None:
    """Add the gradient of `last_inputs` to those of the inputs (B, T, C) and of the inputs before, (B, C, K-1)."""
    columns, length = d_after.shape[2], d_xBC.shape[1]
    if lengths is None and length >= columns:
        d_xBC[:, length - columns :] += d_after.mT
        return
    ends = torch.full((len(d_xBC),), length, device=d_xBC.device) if lengths is None else lengths
    index = (ends[:, None] + torch.arange(columns, device=d_xBC.device)).unsqueeze(1).expand_as(d_after)
    old = index < columns
    d_conv.scatter_add_(2, index.clamp(max=columns - 1), d_after.masked_fill(~old, 0).to(d_conv.dtype))
    of_row = d_after.masked_fill(old, 0).to(d_xBC.dtype).mT
    d_xBC.scatter_add_(1, (index - columns).clamp(min=0).mT, of_row)
