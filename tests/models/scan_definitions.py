"""The definitions of all scans, one token at a time: the truth of their tests.

Arguments and results are those of the scans.
"""

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.scan_backends import repeat_heads
from hf_recurrent_lengthgen.models.scan_trapezoid import turned


def outer(factor: Tensor, x: Tensor, B: Tensor) -> Tensor:
    """factor x B^T of each head."""
    return (factor[..., None] * x)[..., None] * B[..., None, :]


def scan_ssd_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    repeats = x.shape[2] // B.shape[2]
    state, outputs = initial_state, []
    for t in range(x.shape[1]):
        B_BHN = B[:, t].repeat_interleave(repeats, dim=1)
        C_BHN = C[:, t].repeat_interleave(repeats, dim=1)
        decay_BH = (dt[:, t] * A).exp()
        update_BHPN = (dt[:, t, :, None] * x[:, t])[..., None] * B_BHN[:, :, None, :]
        state = decay_BH[..., None, None] * state + update_BHPN
        outputs.append((state * C_BHN[:, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), state


def scan_selective_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    state, outputs = initial_state, []
    for t in range(x.shape[1]):
        decay_BDN = torch.exp(dt[:, t, :, None] * A)
        state = decay_BDN * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1) + D * x[:, t])
    return torch.stack(outputs, dim=1), state


def scan_trapezoid_reference(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    state, outputs = initial_state, []
    now, late = dt * share, dt * (1 - share)
    for t in range(dt.shape[1]):
        before = state + outer(late[:, t], x[:, t], B[:, t])
        angles = (dt[:, t, :, None] * w[:, t, None])[:, :, None]
        state = g[:, t, :, None, None].exp() * turned(before, angles.cos(), -angles.sin())
        state = state + outer(now[:, t], x[:, t + 1], B[:, t + 1])
        outputs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t + 1])
    return torch.stack(outputs, dim=1), state


def scan_gla_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    state, outputs = initial_state, []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None].exp() + v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state


def scan_rwkv6_reference(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    state, outputs = initial_state, []
    for t in range(r.shape[1]):
        update_BHPN = v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append(((state + u[:, None] * update_BHPN) * r[:, t, :, None]).sum(-1))
        state = state * w[:, t, :, None].exp() + update_BHPN
    return torch.stack(outputs, dim=1), state


def scan_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    state, outputs = initial_state, []
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    for t in range(q.shape[1]):
        key_BH1N = k[:, t, :, None]
        state = state * g[:, t, :, None].exp()
        change_BHP = beta[:, t, :, None] * (v[:, t] - (state * key_BH1N).sum(-1))
        state = state + change_BHP[..., None] * key_BH1N
        outputs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state


def scan_dplr_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    state, outputs = initial_state, []
    for t in range(q.shape[1]):
        read_BHP = (state * a[:, t, :, None]).sum(-1)
        state = state * g[:, t, :, None].exp() + read_BHP[..., None] * b[:, t, :, None]
        state = state + v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state
