"""Every scan, its definition, and inputs for it: the registry behind test_scans.py."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.scan_delta import scan_delta, scan_dplr
from hf_recurrent_lengthgen.models.scan_gla import scan_gla
from hf_recurrent_lengthgen.models.scan_rwkv6 import scan_rwkv6
from hf_recurrent_lengthgen.models.scan_selective import scan_selective
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd
from hf_recurrent_lengthgen.models.scan_trapezoid import scan_trapezoid

from .scan_definitions import (
    scan_delta_reference,
    scan_dplr_reference,
    scan_gla_reference,
    scan_rwkv6_reference,
    scan_selective_reference,
    scan_ssd_reference,
    scan_trapezoid_reference,
)

Inputs = dict[str, Tensor]
Results = tuple[Tensor, Tensor]
BATCH, HEADS, P, N = 2, 4, 3, 5
RESETS = [3, 20, 21, 40, 90]


class Scan(NamedTuple):
    """One scan under test.

    Attributes:
        name: For the test's id.
        scan: The function under test.
        reference: The definition.
        make_inputs: (length, dtype, rate, heads) to random arguments by name; decays grow with the rate.
        over_time: Arguments that have a time dimension.
        low: Arguments that may come in a dtype below that of the state.
        idle: The inputs, changed to leave the state as it is.
        resets: Inputs of 128 tokens with weak decays, but strong ones at RESETS.
        decays: Arguments that the decays are made of: one over time, and Mamba's A.
        paced: Inputs, a factor for each token (T,) and one for each head (H,), to inputs whose log decays have these
            factors: in Mamba the first in dt, the second in A.
        kernel: Name of the kernel in the scan's file.
        package: That brings the kernel.
        error: Of float32 against float64, relative to the largest entry.
        before: Further arguments that have a time dimension, with the token before the first one in front.
    """

    name: str
    scan: Callable[..., Results]
    reference: Callable[..., Results]
    make_inputs: Callable[..., Inputs]
    over_time: tuple[str, ...]
    low: tuple[str, ...]
    idle: Callable[[Inputs], Inputs]
    resets: Callable[[], Inputs]
    decays: tuple[str, ...]
    paced: Callable[[Inputs, Tensor, Tensor], Inputs]
    kernel: str
    package: str
    error: float
    before: tuple[str, ...] = ()


def _random(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Normal and uniform numbers that do not depend on the dtype."""
    generator = torch.Generator().manual_seed(0)
    return (
        lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype),
        lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype),
    )


# --- Mamba-2 ---


def ssd_inputs(
    length: int,
    dtype: torch.dtype = torch.float64,
    rate: float = 1.0,
    groups: int = 2,
    heads: int = HEADS,
) -> Inputs:
    """Decays exp(-rate * dt) with dt uniform up to 0.5 times 1..H."""
    normal, uniform = _random(dtype)
    return {
        "x": normal(BATCH, length, heads, P),
        "dt": uniform(BATCH, length, heads) / 2,
        "A": -rate * torch.arange(1, heads + 1, dtype=dtype),
        "B": normal(BATCH, length, groups, N),
        "C": normal(BATCH, length, groups, N),
        "D": normal(heads),
        "initial_state": normal(BATCH, heads, P, N),
    }


def ssd_resets(groups: int) -> Inputs:
    inputs = ssd_inputs(128, rate=100.0, groups=groups)
    inputs["dt"] = inputs["dt"] * 1e-2
    inputs["dt"][:, RESETS] = 10.0  # dt A = -1000
    return inputs


def ssd(groups: int) -> Scan:
    return Scan(
        name=f"ssd-{groups}-groups",
        scan=scan_ssd,
        reference=scan_ssd_reference,
        make_inputs=partial(ssd_inputs, groups=groups),
        over_time=("x", "dt", "B", "C"),
        low=("x", "B", "C"),
        idle=lambda inputs: inputs | {"dt": torch.zeros_like(inputs["dt"])},
        resets=partial(ssd_resets, groups),
        decays=("dt", "A"),
        paced=lambda inputs, steps, rates: inputs | {"dt": inputs["dt"] * steps[:, None], "A": inputs["A"] * rates},
        kernel="mamba_chunk_scan_combined",
        package="mamba-ssm",
        error=2e-6,
    )


# --- Mamba-1 ---


def selective_inputs(length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS) -> Inputs:
    """Steps up to 0.5, decay rates up to `rate` times N, and two channels for each of the other scans' heads."""
    normal, uniform = _random(dtype)
    return {
        "x": normal(BATCH, length, 2 * heads),
        "dt": uniform(BATCH, length, 2 * heads) / 2,
        "A": -rate * N * uniform(2 * heads, N),
        "B": normal(BATCH, length, N),
        "C": normal(BATCH, length, N),
        "D": normal(2 * heads),
        "initial_state": normal(BATCH, 2 * heads, N),
    }


def selective_resets() -> Inputs:
    inputs = selective_inputs(128)
    inputs["dt"] = inputs["dt"] * 1e-2
    inputs["dt"][:, RESETS] = 1e4
    return inputs


def _paced_channels(inputs: Inputs, steps: Tensor, rates: Tensor) -> Inputs:
    return inputs | {"dt": inputs["dt"] * steps[:, None], "A": inputs["A"] * rates.repeat_interleave(2)[:, None]}


SELECTIVE = Scan(
    name="selective",
    scan=scan_selective,
    reference=scan_selective_reference,
    make_inputs=selective_inputs,
    over_time=("x", "dt", "B", "C"),
    low=("x", "B", "C"),
    idle=lambda inputs: inputs | {"dt": torch.zeros_like(inputs["dt"])},
    resets=selective_resets,
    decays=("dt", "A"),
    paced=_paced_channels,
    kernel="selective_scan",
    package="triton",
    error=1e-6,
)


# --- GLA and RWKV-6 ---


def gla_inputs(length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS) -> Inputs:
    """Decays exp(-rate * u) with u uniform up to 2."""
    normal, uniform = _random(dtype)
    return {
        "q": normal(BATCH, length, heads, N),
        "k": normal(BATCH, length, heads, N),
        "v": normal(BATCH, length, heads, P),
        "g": -2 * rate * uniform(BATCH, length, heads, N),
        "initial_state": normal(BATCH, heads, P, N),
    }


def rwkv6_inputs(length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS) -> Inputs:
    inputs = gla_inputs(length, dtype, rate, heads)
    names = {"q": "r", "g": "w"}
    u = torch.randn(heads, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return {names.get(name, name): value for name, value in inputs.items()} | {"u": u}


def _resets(make_inputs: Callable[..., Inputs], gate: str) -> Inputs:
    inputs = make_inputs(128, rate=1e-2)
    inputs[gate][:, RESETS] = -1000.0
    return inputs


GLA = Scan(
    name="gla",
    scan=scan_gla,
    reference=scan_gla_reference,
    make_inputs=gla_inputs,
    over_time=("q", "k", "v", "g"),
    low=("q", "k", "v"),
    idle=lambda inputs: inputs | {name: torch.zeros_like(inputs[name]) for name in ("g", "k")},
    resets=partial(_resets, gla_inputs, "g"),
    decays=("g",),
    paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)[..., None]},
    kernel="chunk_gla",
    package="flash-linear-attention",
    error=1e-6,
)
RWKV6 = Scan(
    name="rwkv6",
    scan=scan_rwkv6,
    reference=scan_rwkv6_reference,
    make_inputs=rwkv6_inputs,
    over_time=("r", "k", "v", "w"),
    low=("r", "k", "v"),
    idle=lambda inputs: inputs | {name: torch.zeros_like(inputs[name]) for name in ("w", "k")},
    resets=partial(_resets, rwkv6_inputs, "w"),
    decays=("w",),
    paced=lambda inputs, steps, rates: inputs | {"w": inputs["w"] * torch.outer(steps, rates)[..., None]},
    kernel="chunk_rwkv6",
    package="flash-linear-attention",
    error=1e-6,
)

# --- the delta rule and RWKV-7 ---


def delta_inputs(
    length: int,
    dtype: torch.dtype = torch.float64,
    rate: float = 1.0,
    heads: int = HEADS,
    scalar: bool = False,
) -> Inputs:
    """Keys of norm 1, beta uniform up to 2; one gate per head if `scalar`."""
    _, uniform = _random(dtype)
    inputs = gla_inputs(length, dtype, rate, heads)
    if scalar:
        inputs["g"] = inputs["g"][..., :1]
    k = inputs["k"].double()
    inputs["k"] = (k / k.norm(dim=-1, keepdim=True)).to(dtype)
    return inputs | {"beta": 2 * uniform(BATCH, length, heads)}


def dplr_inputs(length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS) -> Inputs:
    """As in RWKV-7: -kappa of norm 1 is read, and kappa times a rate between 0 and 1 is written."""
    _, uniform = _random(dtype)
    inputs = gla_inputs(length, dtype, rate, heads)
    kappa = delta_inputs(length, dtype, rate, heads)["k"].flip(-1)
    return inputs | {"a": -kappa, "b": kappa * uniform(BATCH, length, heads, N)}


def _zeros(*names: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs | {name: torch.zeros_like(inputs[name]) for name in names}


def delta(scalar: bool) -> Scan:
    make_inputs = partial(delta_inputs, scalar=scalar)
    return Scan(
        name="delta-scalar" if scalar else "delta-channels",
        scan=scan_delta,
        reference=scan_delta_reference,
        make_inputs=make_inputs,
        over_time=("q", "k", "v", "g", "beta"),
        low=("q", "k", "v"),
        idle=_zeros("g", "beta"),
        resets=partial(_resets, make_inputs, "g"),
        decays=("g",),
        paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)[..., None]},
        kernel="chunk_gated_delta_rule" if scalar else "chunk_kda",
        package="flash-linear-attention",
        error=2e-6,
    )


DPLR = Scan(
    name="dplr",
    scan=scan_dplr,
    reference=scan_dplr_reference,
    make_inputs=dplr_inputs,
    over_time=("q", "k", "v", "g", "a", "b"),
    low=("q", "k", "v", "a", "b"),
    idle=_zeros("g", "k", "b"),
    resets=partial(_resets, dplr_inputs, "g"),
    decays=("g",),
    paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)[..., None]},
    kernel="chunk_dplr_delta_rule",
    package="flash-linear-attention",
    error=2e-6,
)

# --- Mamba-3 ---


def trapezoid_inputs(
    length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS, angles: int = N // 2
) -> Inputs:
    """Decays exp(-rate * u) with u uniform up to 0.5, and angles of up to 1.5."""
    normal, uniform = _random(dtype)
    return {
        "dt": uniform(BATCH, length, heads) / 2,
        "g": -rate * uniform(BATCH, length, heads) / 2,
        "share": uniform(BATCH, length, heads),
        "w": 6 * uniform(BATCH, length, angles) - 3,
        "x": normal(BATCH, 1 + length, heads, P),
        "B": normal(BATCH, 1 + length, heads, N),
        "C": normal(BATCH, length, heads, N),
        "D": normal(heads),
        "initial_state": normal(BATCH, heads, P, N),
    }


TRAPEZOID = Scan(
    name="trapezoid",
    scan=scan_trapezoid,
    reference=scan_trapezoid_reference,
    make_inputs=trapezoid_inputs,
    over_time=("dt", "g", "share", "w", "C"),
    before=("x", "B"),
    low=("x", "B", "C"),
    idle=_zeros("dt", "g"),
    resets=partial(_resets, trapezoid_inputs, "g"),
    decays=("g",),
    paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)},
    kernel="chunk_simple_gla",
    package="flash-linear-attention",
    error=2e-6,
)

DELTA = [delta(True), delta(False), DPLR]
SCANS = [ssd(1), ssd(2), ssd(4), SELECTIVE, GLA, RWKV6, *DELTA, TRAPEZOID]
