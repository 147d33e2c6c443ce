"""Every scan, its definition by single entries, and inputs for it: the registry behind test_scans.py."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.scan_delta import (
    scan_delta,
    scan_delta_reference,
    scan_dplr,
    scan_dplr_reference,
)
from hf_recurrent_lengthgen.models.scan_gla import scan_gla, scan_gla_reference
from hf_recurrent_lengthgen.models.scan_rwkv6 import scan_rwkv6, scan_rwkv6_reference
from hf_recurrent_lengthgen.models.scan_selective import scan_selective, scan_selective_reference
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd, scan_ssd_reference

Inputs = dict[str, Tensor]
Results = tuple[Tensor, Tensor]
BATCH, HEADS, P, N = 2, 4, 3, 5
RESETS = [3, 20, 21, 40, 90]


class Scan(NamedTuple):
    """One scan under test.

    Attributes:
        name: For the test's id.
        scan: The function under test.
        reference: The definition beside it.
        loop: The equation by single entries, written for the test.
        make_inputs: (length, dtype, rate, heads) to random arguments by name; decays grow with the rate.
        over_time: Arguments that have a time dimension.
        low: Arguments that may come in a dtype below that of the state.
        idle: The inputs, changed to leave the state as it is.
        resets: Inputs of 128 tokens with weak decays, but strong ones at RESETS.
        decays: Arguments that the decays are made of: one over time, and Mamba's A.
        paced: Inputs, a factor for each token (T,) and one for each head (H,), to inputs whose log decays have these
            factors: in Mamba the first in dt, the second in A.
        decay: Of the first token, against the state; in `DELTA` its transition, (B, H, N, N).
        kernel: Name of the kernel in the scan's file.
        package: That brings the kernel.
        error: Of float32 against float64, relative to the largest entry.
    """

    name: str
    scan: Callable[..., Results]
    reference: Callable[..., Results]
    loop: Callable[..., Results]
    make_inputs: Callable[..., Inputs]
    over_time: tuple[str, ...]
    low: tuple[str, ...]
    idle: Callable[[Inputs], Inputs]
    resets: Callable[[], Inputs]
    decays: tuple[str, ...]
    paced: Callable[[Inputs, Tensor, Tensor], Inputs]
    decay: Callable[[Inputs], Tensor]
    kernel: str
    package: str
    error: float


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


def ssd_loop(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor) -> Results:
    """Eq. 1 and 4 of arXiv:2507.02782 by single entries: batch row, token and head in plain loops."""
    heads_per_group = x.shape[2] // B.shape[2]
    rows, finals = [], []
    for b in range(x.shape[0]):
        h = [initial_state[b, k] for k in range(x.shape[2])]
        tokens = []
        for t in range(x.shape[1]):
            for k in range(x.shape[2]):
                h[k] = (dt[b, t, k] * A[k]).exp() * h[k] + dt[b, t, k] * torch.outer(
                    x[b, t, k], B[b, t, k // heads_per_group]
                )
            tokens.append(
                torch.stack([h[k] @ C[b, t, k // heads_per_group] + D[k] * x[b, t, k] for k in range(x.shape[2])])
            )
        rows.append(torch.stack(tokens))
        finals.append(torch.stack(h))
    return torch.stack(rows), torch.stack(finals)


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
        loop=ssd_loop,
        make_inputs=partial(ssd_inputs, groups=groups),
        over_time=("x", "dt", "B", "C"),
        low=("x", "B", "C"),
        idle=lambda inputs: inputs | {"dt": torch.zeros_like(inputs["dt"])},
        resets=partial(ssd_resets, groups),
        decays=("dt", "A"),
        paced=lambda inputs, steps, rates: inputs | {"dt": inputs["dt"] * steps[:, None], "A": inputs["A"] * rates},
        decay=lambda inputs: (inputs["dt"][:, 0] * inputs["A"]).exp()[..., None, None],
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


def selective_loop(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> Results:
    """Eq. 2a and Algorithm 2 of arXiv:2312.00752 by single entries: batch row, token and channel in plain loops."""
    rows, finals = [], []
    for b in range(x.shape[0]):
        h, tokens = list(initial_state[b]), []
        for t in range(x.shape[1]):
            h = [(dt[b, t, d] * A[d]).exp() * h[d] + dt[b, t, d] * B[b, t] * x[b, t, d] for d in range(x.shape[2])]
            tokens.append(torch.stack([C[b, t] @ h[d] + D[d] * x[b, t, d] for d in range(x.shape[2])]))
        rows.append(torch.stack(tokens))
        finals.append(torch.stack(h))
    return torch.stack(rows), torch.stack(finals)


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
    loop=selective_loop,
    make_inputs=selective_inputs,
    over_time=("x", "dt", "B", "C"),
    low=("x", "B", "C"),
    idle=lambda inputs: inputs | {"dt": torch.zeros_like(inputs["dt"])},
    resets=selective_resets,
    decays=("dt", "A"),
    paced=_paced_channels,
    decay=lambda inputs: (inputs["dt"][:, 0, :, None] * inputs["A"]).exp(),
    kernel="selective_scan_fn",
    package="mamba-ssm",
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


def gla_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor) -> Results:
    """Eq. 3 of arXiv:2312.06635 by single entries, with its state: (N, P), rows decayed."""
    rows, finals = [], []
    for b in range(q.shape[0]):
        S = [initial_state[b, h].T for h in range(q.shape[2])]
        tokens = []
        for t in range(q.shape[1]):
            S = [torch.diag(g[b, t, h].exp()) @ S[h] + torch.outer(k[b, t, h], v[b, t, h]) for h in range(q.shape[2])]
            tokens.append(torch.stack([q[b, t, h] @ S[h] for h in range(q.shape[2])]))
        rows.append(torch.stack(tokens))
        finals.append(torch.stack([state.T for state in S]))
    return torch.stack(rows), torch.stack(finals)


def rwkv6_inputs(length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS) -> Inputs:
    inputs = gla_inputs(length, dtype, rate, heads)
    names = {"q": "r", "g": "w"}
    u = torch.randn(heads, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return {names.get(name, name): value for name, value in inputs.items()} | {"u": u}


def rwkv6_loop(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor) -> Results:
    """Section 4 of arXiv:2404.05892 by single entries, with its state: (N, P), rows decayed."""
    rows, finals = [], []
    for b in range(r.shape[0]):
        S = [initial_state[b, h].T for h in range(r.shape[2])]
        tokens = []
        for t in range(r.shape[1]):
            outputs = []
            for h in range(r.shape[2]):
                kv = torch.outer(k[b, t, h], v[b, t, h])
                outputs.append(r[b, t, h] @ (torch.diag(u[h]) @ kv + S[h]))
                S[h] = torch.diag(w[b, t, h].exp()) @ S[h] + kv
            tokens.append(torch.stack(outputs))
        rows.append(torch.stack(tokens))
        finals.append(torch.stack([state.T for state in S]))
    return torch.stack(rows), torch.stack(finals)


def _resets(make_inputs: Callable[..., Inputs], gate: str) -> Inputs:
    inputs = make_inputs(128, rate=1e-2)
    inputs[gate][:, RESETS] = -1000.0
    return inputs


GLA = Scan(
    name="gla",
    scan=scan_gla,
    reference=scan_gla_reference,
    loop=gla_loop,
    make_inputs=gla_inputs,
    over_time=("q", "k", "v", "g"),
    low=("q", "k", "v"),
    idle=lambda inputs: inputs | {name: torch.zeros_like(inputs[name]) for name in ("g", "k")},
    resets=partial(_resets, gla_inputs, "g"),
    decays=("g",),
    paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)[..., None]},
    decay=lambda inputs: inputs["g"][:, 0, :, None].exp(),
    kernel="chunk_gla",
    package="flash-linear-attention",
    error=1e-6,
)
RWKV6 = Scan(
    name="rwkv6",
    scan=scan_rwkv6,
    reference=scan_rwkv6_reference,
    loop=rwkv6_loop,
    make_inputs=rwkv6_inputs,
    over_time=("r", "k", "v", "w"),
    low=("r", "k", "v"),
    idle=lambda inputs: inputs | {name: torch.zeros_like(inputs[name]) for name in ("w", "k")},
    resets=partial(_resets, rwkv6_inputs, "w"),
    decays=("w",),
    paced=lambda inputs, steps, rates: inputs | {"w": inputs["w"] * torch.outer(steps, rates)[..., None]},
    decay=lambda inputs: inputs["w"][:, 0, :, None].exp(),
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


def delta_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor) -> Results:
    """Eq. 1 of arXiv:2510.26692 by single entries, S (N, P): S = (I - beta k k^T) Diag(alpha) S + beta k v^T; with
    one gate per head, Eq. 10 of arXiv:2412.06464."""
    rows, finals = [], []
    eye = torch.eye(k.shape[3], dtype=k.dtype)
    for b in range(q.shape[0]):
        S = [initial_state[b, h].T for h in range(q.shape[2])]
        tokens = []
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                key, rate = k[b, t, h], beta[b, t, h]
                decay = torch.diag(g[b, t, h].exp().expand(len(key)))
                S[h] = (eye - rate * torch.outer(key, key)) @ (decay @ S[h]) + rate * torch.outer(key, v[b, t, h])
            tokens.append(torch.stack([S[h].T @ q[b, t, h] for h in range(q.shape[2])]))
        rows.append(torch.stack(tokens))
        finals.append(torch.stack([state.T for state in S]))
    return torch.stack(rows), torch.stack(finals)


def dplr_inputs(length: int, dtype: torch.dtype = torch.float64, rate: float = 1.0, heads: int = HEADS) -> Inputs:
    """As in RWKV-7: -kappa of norm 1 is read, and kappa times a rate between 0 and 1 is written."""
    _, uniform = _random(dtype)
    inputs = gla_inputs(length, dtype, rate, heads)
    kappa = delta_inputs(length, dtype, rate, heads)["k"].flip(-1)
    return inputs | {"a": -kappa, "b": kappa * uniform(BATCH, length, heads, N)}


def dplr_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, initial_state: Tensor) -> Results:
    """Eq. 17 of arXiv:2503.14456 by single entries, whose state is ours: S = S (Diag(w) + a b^T) + v k^T."""
    rows, finals = [], []
    for n in range(q.shape[0]):
        S = [initial_state[n, h] for h in range(q.shape[2])]
        tokens = []
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                transition = torch.diag(g[n, t, h].exp()) + torch.outer(a[n, t, h], b[n, t, h])
                S[h] = S[h] @ transition + torch.outer(v[n, t, h], k[n, t, h])
            tokens.append(torch.stack([S[h] @ q[n, t, h] for h in range(q.shape[2])]))
        rows.append(torch.stack(tokens))
        finals.append(torch.stack(S))
    return torch.stack(rows), torch.stack(finals)


def _zeros(*names: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs | {name: torch.zeros_like(inputs[name]) for name in names}


def delta(scalar: bool) -> Scan:
    make_inputs = partial(delta_inputs, scalar=scalar)
    return Scan(
        name="delta-scalar" if scalar else "delta-channels",
        scan=scan_delta,
        reference=scan_delta_reference,
        loop=delta_loop,
        make_inputs=make_inputs,
        over_time=("q", "k", "v", "g", "beta"),
        low=("q", "k", "v"),
        idle=_zeros("g", "beta"),
        resets=partial(_resets, make_inputs, "g"),
        decays=("g",),
        paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)[..., None]},
        decay=_transition_of_delta,
        kernel="chunk_gated_delta_rule" if scalar else "chunk_kda",
        package="flash-linear-attention",
        error=2e-6,
    )


def _transition_of_delta(inputs: Inputs) -> Tensor:
    k, decay = inputs["k"][:, 0], inputs["g"][:, 0].exp().expand_as(inputs["k"][:, 0])
    kept = torch.eye(N, dtype=k.dtype) - inputs["beta"][:, 0, :, None, None] * k[..., :, None] * k[..., None, :]
    return decay[..., :, None] * kept


def _transition_of_dplr(inputs: Inputs) -> Tensor:
    a, b, g = (inputs[name][:, 0] for name in "abg")
    return torch.diag_embed(g.exp()) + a[..., :, None] * b[..., None, :]


DPLR = Scan(
    name="dplr",
    scan=scan_dplr,
    reference=scan_dplr_reference,
    loop=dplr_loop,
    make_inputs=dplr_inputs,
    over_time=("q", "k", "v", "g", "a", "b"),
    low=("q", "k", "v", "a", "b"),
    idle=_zeros("g", "k", "b"),
    resets=partial(_resets, dplr_inputs, "g"),
    decays=("g",),
    paced=lambda inputs, steps, rates: inputs | {"g": inputs["g"] * torch.outer(steps, rates)[..., None]},
    decay=_transition_of_dplr,
    kernel="chunk_dplr_delta_rule",
    package="flash-linear-attention",
    error=2e-6,
)

DELTA = [delta(True), delta(False), DPLR]
SCANS = [ssd(1), ssd(2), ssd(4), SELECTIVE, GLA, RWKV6, *DELTA]
