"""Mimetic initialization: a state space model that starts out close to linear attention.

"Mimetic Initialization Helps State Space Models Learn to Recall" (Trockman et al. 2024, arXiv:2410.11135).
With decays and step sizes near 1 the map of a layer is y_i = sum_{j <= i} (C_i . B_j) x_j (Eq. 8 and 12; the
indicator of Eq. 8 is printed the wrong way round), which forgets nothing; with W_C close to W_B equal tokens
attend to each other. Such a model also fails soon beyond its training length, unless it is trained for it.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

DELTA_BIAS = math.log(math.expm1(1.0))
"""The inverse of softplus at 1, 0.5413."""


@torch.no_grad()
def mimetic_initialization(
    model: nn.Module,
    a: bool = True,
    delta: bool = True,
    bc: bool = True,
    conv: bool = True,
    c: float = 8.0,
    offset: int = 0,
    layers: Iterable[int] | None = None,
) -> None:
    """Overwrite weights of Mamba-2 mixers, in place, by those of mimetic initialization.

    A mixer is any module with 1-dimensional parameters `A_log` and `dt_bias` (H,) and with `in_proj`, `conv1d`
    and `out_proj`, in the layout of Transformers and mamba-ssm: `in_proj` has the rows [z, x, B, C, dt]. So
    models whose code came with a checkpoint are covered too. The config does not change, and nothing else does:
    `in_proj.bias`, if there is one, and the rows of dt keep their values.

    Args:
        model: A model with Mamba-2 mixers, freshly initialized as a rule.
        a: `A ~ 1` (Eq. 3): `A_log <- -c log(1..H)`, so the n-th head decays by exp(-n^-c) per unit step. The
            first head is a fixed point of the scaling and keeps decaying by exp(-1), as in the paper.
        delta: `Delta ~ 1` (Eq. 4): `dt_bias <- softplus^-1(1)`.
        bc: Correlated tokens (section 4): `W_C <- (W_C + W_B) / 2`, group by group.
        conv: Identity convolution: last tap 1, all other taps and the bias 0.
        c: Strength of `a`, above 0; the paper takes it from {2, 4, 8}.
        offset: Of `a`: log(1 + offset..H + offset). With 1 no head is left at the fixed point.
        layers: Which mixers, counted from 0 in the order of the model; None for all.

    Raises:
        ValueError: for a model without Mamba-2 mixers, one with another layout of `in_proj`, a layer that is
            not there, c <= 0 or a negative offset. The model is unchanged then.
    """
    if not (math.isfinite(c) and c > 0):
        raise ValueError(f"c must be finite and above 0, got {c}; the paper takes 2, 4 or 8.")
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise ValueError(f"offset must be an integer of at least 0, got {offset!r}.")
    mixers: list[Any] = [module for module in model.modules() if _is_mamba2_mixer(module)]
    if not mixers:
        raise ValueError(
            f"{type(model).__name__} has no Mamba-2 mixer: no module with A_log and dt_bias of shape (heads,), "
            "in_proj, conv1d and out_proj."
        )
    chosen = list(range(len(mixers)) if layers is None else layers)
    unknown = [index for index in chosen if index not in range(len(mixers))]
    if unknown or not chosen:
        raise ValueError(f"layers must be some of 0 to {len(mixers) - 1}, got {chosen}; None takes all.")
    # every mixer is checked before any is changed, and changed once: averaging twice would move W_C further
    for mixer, (b_rows, c_rows) in [(mixers[index], _bc_rows(mixers[index])) for index in sorted(set(chosen))]:
        if a:
            heads = torch.arange(1, mixer.A_log.numel() + 1, dtype=torch.float64) + offset
            mixer.A_log.copy_(-c * heads.log())
        if delta:
            mixer.dt_bias.fill_(DELTA_BIAS)
        if bc:
            weight = mixer.in_proj.weight
            weight[c_rows] = (weight[c_rows] + weight[b_rows]) / 2
        if conv:
            mixer.conv1d.weight.zero_()
            mixer.conv1d.weight[..., -1] = 1.0
            if mixer.conv1d.bias is not None:
                mixer.conv1d.bias.zero_()


def _is_mamba2_mixer(module: Any) -> bool:
    heads: list[Any] = [getattr(module, name, None) for name in ("A_log", "dt_bias")]
    inside = [getattr(getattr(module, name, None), "weight", None) for name in ("in_proj", "conv1d", "out_proj")]
    return all(isinstance(value, torch.Tensor) for value in heads + inside) and heads[0].ndim == heads[1].ndim == 1


def _bc_rows(mixer: Any) -> tuple[slice, slice]:
    """Rows of B and of C in `in_proj`, from the shapes: each has n_groups * state_size of them."""
    inner, rows = mixer.out_proj.weight.shape[1], mixer.in_proj.weight.shape[0]
    bc, odd = divmod(mixer.conv1d.weight.shape[0] - inner, 2)
    if odd or bc < 1 or rows != 2 * inner + 2 * bc + mixer.A_log.numel():
        raise ValueError(
            f"in_proj has {rows} rows, but with {inner} inner channels, {mixer.conv1d.weight.shape[0]} convolution "
            f"channels and {mixer.A_log.numel()} heads the rows [z, x, B, C, dt] would be another number."
        )
    return slice(2 * inner, 2 * inner + bc), slice(2 * inner + bc, 2 * inner + 2 * bc)
