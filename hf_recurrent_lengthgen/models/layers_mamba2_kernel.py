"""The Mamba-2 mixer between its projections as one operation on kernels of mamba-ssm and causal-conv1d.

    z, xBC, dt = zxbcdt                                     x, B, C = silu(conv(xBC))
    y = scan(x, softplus(dt + dt_bias), A, B, C, D)         out = RMSNorm(y silu(z)) W

mamba-ssm's own fused path (`MambaSplitConv1dScanCombinedFn`) has no state of the convolution. This one takes the
states of convolution and scan, and returns both, with all gradients. Like theirs it keeps its input, y and 1 / rms for
the backward pass, which computes the convolution again and, if the output projection is inside, the normed output.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers_mixer import is_plain
from .rows import Rows
from .rows_moved import last_inputs
from .scan_backends import OPERATORS, without_autocast
from .scan_ssd import kernel_block, kernel_chunk
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
    """What the weights do not tell."""

    heads: int  # H
    head_dim: int  # P
    groups: int  # G
    state_size: int  # N
    chunk_size: int  # tokens of a chunk of the scan
    least: float  # of step sizes
    largest: float
    norm_group: int  # channels over which the norm goes
    eps: float  # of the norm
    norm_before_gate: bool = False  # RMSNorm(y) silu(z) in place of RMSNorm(y silu(z))

    @classmethod
    def of(cls, numbers: list[float]) -> "Mamba2Sizes":
        """From `list(sizes)`, as an operator takes it."""
        heads, head_dim, groups, state, chunk, least, largest, norm, eps, before = numbers
        whole = map(int, (heads, head_dim, groups, state, chunk))
        return cls(*whole, least, largest, int(norm), eps, bool(before))  # type: ignore[call-arg, arg-type]

    @property
    def parts(self) -> list[int]:
        """Channels of z, xBC and dt."""
        inner = self.heads * self.head_dim
        return [inner, inner + 2 * self.groups * self.state_size, self.heads]

    def scanned(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, H, P), B and C (B, T, G, N)."""
        x, B, C = xBC.split([self.parts[0], *[self.groups * self.state_size] * 2], -1)
        B, C = (part.view(*xBC.shape[:2], self.groups, -1) for part in (B, C))  # unflatten is slow
        return x.view(*xBC.shape[:2], self.heads, -1), B, C


def takes(zxbcdt: Tensor, rows: Rows | None, sizes: Mamba2Sizes, modules: tuple[nn.Module | None, ...]) -> bool:
    """Whether `fused_mamba2` computes what the modules would: those whose weights it reads, convolution and norm.

    Not: one token, a sequence that processes share, sizes beyond 32-bit addresses, a least step size at padding,
    or modules that are more than their weights.
    """
    if not AVAILABLE or zxbcdt.shape[1] == 1 or not all(map(is_plain, modules)):
        return False
    if rows is not None and (rows.group is not None or (rows.real is not None and sizes.least > 0)):
        return False
    _, xBC, dt = zxbcdt.split(sizes.parts, -1)
    x, B, _ = sizes.scanned(xBC)
    batch, tokens = kernel_block(x, dt, B, kernel_chunk(sizes.chunk_size))
    fits = zxbcdt.shape[0] <= batch and zxbcdt.shape[1] <= tokens
    return fits and sizes.norm_group * zxbcdt.element_size() <= _NORM_MAX_BYTES


def fused_mamba2(
    mixer: Any,
    zxbcdt: Tensor,
    A: Tensor,
    D: Tensor,
    norm: nn.Module | None,
    sizes: Mamba2Sizes,
    state: LayerState,
    rows: Rows | None,
) -> tuple[Tensor, LayerState]:
    """The outputs of a mixer, (B, T, D), and the state after the last real token; arguments as of
    `after_input_projection`, with A and D as the scan takes them, (H,).

    A plain `nn.Linear` as output projection is computed inside, so its input need not be saved; others are called.
    """
    out_proj = mixer.out_proj
    inside = type(out_proj) is nn.Linear and is_plain(out_proj)
    device = zxbcdt.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else zxbcdt.dtype
    of_conv, of_norm = (mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias), None if norm is None else norm.weight
    projection = (out_proj.weight, out_proj.bias) if inside else (None, None)
    weights = *of_conv, mixer.dt_bias, A, D, of_norm, *projection
    states = state.recurrent, state.conv, None if rows is None else rows.lengths
    with without_autocast(device):
        out, recurrent, conv, *_ = _operator(zxbcdt.contiguous(), *weights, *states, list(sizes), dtype)
    return (out if inside else out_proj(out)), LayerState(recurrent, conv)  # not an OwnLayerState: callers keep it


_TENSORS = (
    "Tensor zxbcdt, Tensor weight, Tensor? bias, Tensor dt_bias, Tensor A, Tensor D, Tensor? norm, "
    "Tensor? out_weight, Tensor? out_bias, Tensor ssm_state, Tensor conv_state, Tensor? lengths"
)
_SETTINGS = "float[] sizes, ScalarType dtype"


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    """Outputs, both states after, and what the backward pass needs: y and 1 / rms. Products are in `dtype`."""
    zxbcdt, weight, bias, dt_bias, A, D, norm, *others = inputs
    out_weight, out_bias, ssm_state, conv_state, lengths, sizes, dtype = others
    of = Mamba2Sizes.of(sizes)
    z, xBC, dt = zxbcdt.split(of.parts, -1)
    x, B, C = of.scanned(_convolve(xBC, weight, bias, conv_state))
    gate = None if norm is not None else z.unflatten(-1, x.shape[2:])
    options = _scan_options(dt_bias, D, of) | {"z": gate, "initial_states": ssm_state}
    gated, y, _, _, _, final = _mamba_chunk_scan_combined_fwd(x, _without_padding(dt, lengths), A, B, C, **options)
    if norm is None:
        rstd = y.new_empty(0)
    else:
        y = gated
        gated, _, rstd = _layer_norm_fwd(
            _tokens(y), norm, None, z=_tokens(zxbcdt)[:, : of.parts[0]], **_norm_options(of)
        )
    out = gated.view(z.shape)
    if out_weight is not None:
        out = out.new_empty(*z.shape[:2], len(out_weight), dtype=dtype)  # no view, so that a hook may change it
        flat, to, weight_t = _tokens(gated).to(dtype), _tokens(out), out_weight.to(dtype).mT
        if out_bias is None:
            torch.mm(flat, weight_t, out=to)
        else:
            torch.addmm(out_bias.to(dtype), flat, weight_t, out=to)
    return out, final.to(ssm_state.dtype), last_inputs(xBC, conv_state, lengths), y, rstd


def _backward(*inputs: Any) -> list[Tensor]:
    """Gradients of the arguments of `_forward` up to the states; empty tensors for those that are None."""
    d_out, d_final, d_after, zxbcdt, weight, bias, dt_bias, A, D, norm, *others = inputs
    out_weight, out_bias, ssm_state, conv_state, lengths, y, rstd, sizes, dtype = others
    of, project = Mamba2Sizes.of(sizes), out_weight is not None
    z, xBC, dt = zxbcdt.split(of.parts, -1)
    d_all, d_convolved = torch.empty_like(zxbcdt), torch.empty_like(xBC, memory_format=torch.contiguous_format)
    d_z, d_xBC, d_dt = d_all.split(of.parts, -1)
    if d_out is None:
        d_out = z.new_zeros(*z.shape[:2], z.shape[2] if out_weight is None else len(out_weight))
    d_gated = d_out if out_weight is None else (d_out.to(dtype) @ out_weight.to(dtype)).to(y.dtype)
    d_gated = d_gated.contiguous()

    x, B, C = of.scanned(_convolve(xBC, weight, bias, conv_state))
    d_x, d_B, d_C = of.scanned(d_convolved)
    options = _scan_options(dt_bias, D, of) | {"dx": d_x, "ddt": d_dt, "dB": d_B, "dC": d_C}
    options |= {"initial_states": ssm_state, "dfinal_states": d_final}
    d_norm, normed = None, []
    if norm is None:
        heads = x.shape[2:]
        options |= {"z": z.unflatten(-1, heads), "dz": d_z.unflatten(-1, heads), "recompute_output": project}
        d_y = d_gated.view_as(y)
    else:
        gates = {"z": _tokens(zxbcdt)[:, : of.parts[0]], "dz": _tokens(d_all)[:, : of.parts[0]]}
        saved = {"mean": None, "rstd": rstd, "recompute_output": project}
        d_y, d_norm, _, _, *normed = _layer_norm_bwd(
            _tokens(d_gated), _tokens(y), norm, None, **gates, **saved, **_norm_options(of)
        )
    _, _, d_A, _, _, d_D, _, d_dt_bias, d_ssm, *scanned = _mamba_chunk_scan_combined_bwd(
        d_y.view_as(y), x, _without_padding(dt, lengths), A, B, C, y, **options
    )
    to = d_xBC if _aligned(d_xBC) else d_convolved.clone()
    before = _before(conv_state, xBC)
    _, d_weight, d_bias, d_conv = causal_conv1d_bwd_function(
        _channels_last(xBC), weight, bias, d_convolved.mT, None, before, None, to.mT, True, True
    )
    if to is not d_xBC:
        d_xBC.copy_(to)
    d_conv = d_conv.to(conv_state.dtype)
    if d_after is not None:
        _add_to_last_inputs(d_after, d_xBC, d_conv, lengths)
    d_out_weight = d_out_bias = None
    if out_weight is not None:
        flat = _tokens(d_out.to(dtype))
        d_out_weight = flat.mT @ _tokens((normed or scanned)[0]).to(dtype)
        d_out_bias = None if out_bias is None else flat.sum(0, dtype=torch.float32)
    found = d_all, d_weight, d_bias, d_dt_bias, d_A, d_D, d_norm, d_out_weight, d_out_bias, d_ssm, d_conv
    like = zxbcdt, weight, bias, dt_bias, A, D, norm, out_weight, out_bias, ssm_state, conv_state
    pairs = zip(found, like, strict=True)
    return [zxbcdt.new_empty(0) if gradient is None else gradient.to(t.dtype) for gradient, t in pairs]


# Operators: torch.compile takes the whole mixer into one graph.
_operator = torch.library.custom_op(
    f"{OPERATORS}::fused_mamba2",
    _forward,
    mutates_args=(),
    schema=f"({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    f"{OPERATORS}::fused_mamba2_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor? d_out, Tensor? d_final, Tensor? d_after, "
    f"{_TENSORS}, Tensor y, Tensor rstd, {_SETTINGS}) -> Tensor[]",
)


@_operator.register_fake
def _(zxbcdt: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    norm, out_weight, _, ssm_state, conv_state, _, sizes, dtype = tensors[5:]
    of = Mamba2Sizes.of(sizes)
    tokens, inner = zxbcdt.shape[:2], of.parts[0]
    out = zxbcdt.new_empty(
        *tokens, inner if out_weight is None else len(out_weight), dtype=zxbcdt.dtype if out_weight is None else dtype
    )
    groups = 0 if norm is None else tokens[0] * tokens[1] * (inner // of.norm_group)
    rstd = zxbcdt.new_empty(groups, dtype=zxbcdt.dtype if norm is None else torch.float32)
    states = ssm_state.new_empty(ssm_state.shape), conv_state.mT.contiguous().mT.clone()
    return out, *states, zxbcdt.new_empty(*tokens, of.heads, of.head_dim), rstd


@_backward_operator.register_fake
def _(d_out: Any, d_final: Any, d_after: Any, *tensors: Any) -> list[Tensor]:
    return [tensors[0].new_empty(0) if t is None else torch.empty_like(t) for t in tensors[:11]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.sizes, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    with without_autocast(tensors[0].device.type):
        found = _backward_operator(*gradients[:3], *tensors, ctx.sizes, ctx.dtype)
    return *(None if t is None else g for t, g in zip(tensors, found, strict=False)), None, None, None


_operator.register_autograd(_gradients, setup_context=_keep)


def _tokens(x: Tensor) -> Tensor:
    """(B, T, ...) to (B T, channels)."""
    return x.reshape(x.shape[0] * x.shape[1], -1) if x.ndim > 2 else x


def _scan_options(dt_bias: Tensor, D: Tensor, sizes: Mamba2Sizes) -> dict[str, Any]:
    chunk = kernel_chunk(sizes.chunk_size)
    return {
        "chunk_size": chunk,
        "D": D,
        "dt_bias": dt_bias,
        "dt_softplus": True,
        "dt_limit": (sizes.least, sizes.largest),
    }


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


def _before(conv_state: Tensor, xBC: Tensor) -> Tensor:
    """The inputs before the first token, as the convolution takes them."""
    return conv_state.to(xBC.dtype).mT.contiguous().mT


def _convolve(xBC: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor) -> Tensor:
    """silu(conv(xBC)), (B, T, C)."""
    before = _before(conv_state, xBC)
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
