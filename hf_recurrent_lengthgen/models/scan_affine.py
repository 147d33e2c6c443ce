"""What T tokens do to a state, as an affine map of each scan, so that processes can share a sequence (rows_shared.py).

Stays in the package. Shape suffixes as in scan_backends.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .scan_delta import scan_delta, scan_dplr
from .scan_selective import scan_selective
from .scan_trapezoid import AsSSD


class AffineMap(NamedTuple):
    """What a chunk does to the recurrent part of a state.

    Attributes:
        factor: A, (B, ...) to be broadcast over the state, or, if `is_matrix`, (B, H, N, N) to be multiplied from the
            right.
        written: B, the state after the chunk from the zero state.
        is_matrix: Which of both `factor` is.
        read: From the state before the chunk to outputs in the dtype of the state, where that is cheaper than another
            scan; None where it is not.
    """

    factor: Tensor
    written: Tensor
    is_matrix: bool = False
    read: Callable[[Tensor], Tensor] | None = None


def decays_to_end(log_decays: Tensor) -> tuple[Tensor, Tensor]:
    """From log decays (B, T, ...) the decay from each token to the end, (B, T, ...), and of all tokens, (B, ...).

    Sums begin at the end, so that nothing cancels, whatever stands before.
    """
    sums = log_decays.flip(1).cumsum(1)
    return pad(sums.flip(1)[:, 1:], (0, 0) * (sums.ndim - 2) + (0, 1)).exp(), sums[:, -1].exp()


def affine_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **_: object) -> AffineMap:
    """What T tokens do to a state; arguments as of `scan_ssd`."""
    return affine_ssd_of_decays(x, dt, dt * A, B)


def affine_ssd_of_decays(x: Tensor, dt: Tensor, g: Tensor, B: Tensor) -> AffineMap:
    """`affine_ssd` from log decays g (B, T, H)."""
    to_end, total = decays_to_end(g)
    u_BGMT = (x * (dt * to_end)[..., None]).unflatten(2, (B.shape[2], -1)).flatten(3).permute(0, 2, 3, 1)
    written = (u_BGMT @ B.transpose(1, 2)).unflatten(2, (-1, x.shape[3])).flatten(1, 2)
    return AffineMap(total[..., None, None], written)


def affine_trapezoid(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, **_: object
) -> AffineMap:
    """What T tokens do to a state; arguments as of `scan_trapezoid`."""
    as_ssd = AsSSD.of(dt, g, share, w, x, B, C, D)
    found = affine_ssd_of_decays(as_ssd.x, as_ssd.steps, as_ssd.g, as_ssd.keys)
    decay = found.factor * torch.eye(B.shape[3], dtype=g.dtype, device=g.device)
    return AffineMap(as_ssd.decayed(decay), as_ssd.after(found.written), is_matrix=True)


def affine_selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **options: Any) -> AffineMap:
    """What T tokens do to a state; arguments as of `scan_selective`."""
    zero = x.new_zeros(len(x), *A.shape)
    return AffineMap((dt.sum(1)[..., None] * A).exp(), scan_selective(x, dt, A, B, C, D, zero, **options)[1])


def affine_gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *_: Tensor, **__: object) -> AffineMap:
    """What T tokens do to a state; arguments as of `scan_gla` and `scan_rwkv6`."""
    to_end, total = decays_to_end(g)
    return AffineMap(total[:, :, None], v.permute(0, 2, 3, 1) @ (k * to_end).transpose(1, 2))


def _affine_of(
    scan: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **options: Any
) -> AffineMap:
    """What T tokens do to a state; arguments as of `scan_delta` and `scan_dplr`.

    The rows of a state do not meet, so N more of them, which start as unit vectors and get no values, end as the
    matrix of the chunk, and what they give is what reads the state before it.
    """
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    unit = torch.eye(keys, dtype=v.dtype, device=v.device).expand(batch, heads, -1, -1)
    start = torch.cat([unit.new_zeros(batch, heads, width, keys), unit], dim=2)
    values = torch.cat([v, v.new_zeros(batch, length, heads, keys)], dim=3)
    y, end = scan(q, k, values, *gates, start, **options)
    own, reading = y.split([width, keys], dim=3)
    written, matrix = end.split([width, keys], dim=2)

    def read(before: Tensor) -> Tensor:
        return own + (reading.transpose(1, 2) @ before.mT).transpose(1, 2)

    return AffineMap(matrix, written, is_matrix=True, read=read)


affine_delta, affine_dplr = partial(_affine_of, scan_delta), partial(_affine_of, scan_dplr)


def affine_linear(q: Tensor, k: Tensor, v: Tensor) -> AffineMap:
    """What T tokens do to a state; arguments as of `linear_attention`."""
    return AffineMap(k.new_ones(len(k), 1, 1, 1), v.mT @ k)


AFFINE_MAPS: dict[str, Callable[..., AffineMap]] = {
    "linear_attention": affine_linear,
    "scan_delta": affine_delta,
    "scan_dplr": affine_dplr,
    "scan_gla": affine_gated,
    "scan_rwkv6": affine_gated,
    "scan_selective": affine_selective,
    "scan_ssd": affine_ssd,
    "scan_trapezoid": affine_trapezoid,
}
"""The map of each scan, by its name; it takes the inputs of the scan before the state, and its options."""
