"""Mamba-3 as a family under test."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hf_recurrent_lengthgen.models.modeling_stateful_mamba3 import StatefulMamba3ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .family import Family


def mamba3_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Logits and final state of a Mamba-3 model, one token at a time from the equations; x: (B, T, D).

    The recurrence of arXiv:2603.15569 with its own frame: pairs of channels are complex numbers, keys and queries are
    turned by the sum of all angles of the text. Only the state that it returns is turned back by that sum.
    """
    c = model.config
    H, P, N, G = c.num_heads, c.head_dim, c.state_size, c.n_groups
    A = int(N * c.rope_fraction) // 2

    def rms(v: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()

    def turn(v: Tensor, angle: Tensor) -> Tensor:
        paired = v[..., : N - N % 2].unflatten(-1, (-1, 2)).contiguous()
        factor = torch.exp(1j * torch.cat([angle, angle.new_zeros(*angle.shape[:-1], N // 2 - A)], -1))
        turned = torch.view_as_real(torch.view_as_complex(paired) * factor).flatten(-2)
        return torch.cat([turned, v[..., N - N % 2 :]], -1)

    final = []
    for block, (S, last) in zip(model.backbone.layers, state, strict=True):
        m, outputs = block.mixer, []
        angle = x.new_zeros(len(x), H, A)

        def per_head(v: Tensor, bias: Tensor) -> Tensor:
            return v.unflatten(-1, (G, N)).repeat_interleave(H // G, dim=-2) + bias[:, 0]

        value, key = last[..., 0].split([H * P, G * N], -1)
        value_before, key_before = value.unflatten(-1, (H, P)), per_head(key, m.B_bias)
        for t in range(x.shape[1]):
            sizes = [H * P, H * P, G * N, G * N, H, H, H, A]
            z, v, B, C, dt, rate, share, turning = m.in_proj(block.norm.weight * rms(x[:, t])).split(sizes, -1)
            B = (m.B_norm.weight * rms(B.unflatten(-1, (G, N)))).flatten(1)
            C = (m.C_norm.weight * rms(C.unflatten(-1, (G, N)))).flatten(1)
            last = torch.cat([v, B], -1)[..., None]
            dt = softplus(dt + m.dt_bias)
            heavy_tail = torch.where(rate < 0, 1 / (1 - rate), 1 + rate)
            rate = softplus(rate) if c.decay_activation == "softplus" else heavy_tail
            alpha, share = torch.exp(-dt * rate.clamp(min=c.A_floor)), share.sigmoid()
            angle = angle + dt[..., None] * math.pi * turning.tanh()[:, None]
            v, k, q = v.unflatten(-1, (H, P)), turn(per_head(B, m.B_bias), angle), turn(per_head(C, m.C_bias), angle)
            beta, gamma = (1 - share) * dt * alpha, share * dt
            S = alpha[..., None, None] * S + torch.einsum("bh,bhp,bhn->bhpn", beta, value_before, key_before)
            S = S + torch.einsum("bh,bhp,bhn->bhpn", gamma, v, k)
            y = torch.einsum("bhpn,bhn->bhp", S, q) + m.D[:, None] * v
            if c.is_outproj_norm:
                y = rms(y) * m.norm.weight.view(H, P)
            outputs.append(m.out_proj(y.flatten(1) * silu(z)))
            value_before, key_before = v, k
        x = x + torch.stack(outputs, 1)
        if c.intermediate_size is not None:
            up, gate = block.mlp.fc1(block.norm2.weight * rms(x)).chunk(2, -1)
            x = x + block.mlp.fc2(up * silu(gate))
        final.append(LayerState(turn(S, -angle[:, :, None]), last))
    return model.lm_head(model.backbone.norm_f.weight * rms(x)), tuple(final)


MAMBA3 = Family(
    name="mamba3",
    causal_lm_class=StatefulMamba3ForCausalLM,
    fields={"head_dim": 8, "state_size": 8, "n_groups": 2, "residual_in_fp32": False},
    variants={
        "two groups": {},
        "one group, heavy tail, MLP": {"n_groups": 1, "decay_activation": "heavy_tail", "intermediate_size": 12},
        "all keys turn, norm of heads": {"rope_fraction": 1.0, "is_outproj_norm": True},
        "odd keys, biases, fp32 residual, tied": {
            "state_size": 7,
            "use_bias": True,
            "residual_in_fp32": True,
            "tie_word_embeddings": True,
            "A_floor": 0.5,
        },
    },
    loop=mamba3_loop,
    linear_modules={"in_proj", "out_proj"},
    kernel=("modeling_stateful_mamba3", "chunk_simple_gla"),
)
