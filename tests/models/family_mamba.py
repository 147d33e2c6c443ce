"""Mamba-1 and FalconMamba as families under test: one set of classes, distinguished by `mixer_rms_eps`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hf_recurrent_lengthgen.models.modeling_stateful_mamba import StatefulMambaForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .family import Family


def mamba_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Logits and final state of a Mamba-1 or FalconMamba model, one token at a time from the equations; x: (B, T, D).

    Algorithm 2 and Eq. 2a of arXiv:2312.00752 in the block of its Figure 3; the norms of arXiv:2410.05355.
    """
    c = model.config
    R = c.time_step_rank

    def rms(v: Tensor, eps: float) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + eps).sqrt()

    final = []
    for block, (h, columns) in zip(model.backbone.layers, state, strict=True):
        m, outputs, N = block.mixer, [], h.shape[-1]
        A = -m.A_log.exp()
        for t in range(x.shape[1]):
            u, z = m.in_proj(block.norm.weight * rms(x[:, t], c.layer_norm_epsilon)).chunk(2, -1)
            window = torch.cat([columns, u[..., None]], -1)  # (B, D_inner, K)
            bias = 0 if m.conv1d.bias is None else m.conv1d.bias
            u, columns = silu((window * m.conv1d.weight[:, 0]).sum(-1) + bias), window[..., 1:]
            dt, B, C = (u @ m.x_proj.weight.T).split([R, N, N], -1)
            if c.mixer_rms_eps is not None:
                dt, B, C = (rms(v, c.mixer_rms_eps) for v in (dt, B, C))
            dt = softplus(dt @ m.dt_proj.weight.T + m.dt_proj.bias)
            h = (dt[..., None] * A).exp() * h + (dt * u)[..., None] * B[:, None]
            outputs.append(m.out_proj(((h @ C[..., None])[..., 0] + m.D * u) * silu(z)))
        x = x + torch.stack(outputs, 1)
        final.append(LayerState(h, columns))
    return model.lm_head(model.backbone.norm_f.weight * rms(x, c.layer_norm_epsilon)), tuple(final)


MAMBA = Family(
    name="mamba",
    causal_lm_class=StatefulMambaForCausalLM,
    fields={"state_size": 5, "time_step_rank": 6, "residual_in_fp32": False, "tie_word_embeddings": False},
    variants={
        "plain": {},
        "own state size in each layer": {"layer_state_sizes": [3, 12]},
        "two taps, no bias, tied": {"conv_kernel": 2, "use_conv_bias": False, "tie_word_embeddings": True},
        "biases, fp32 residual, wide": {"use_bias": True, "residual_in_fp32": True, "expand": 3, "state_size": 17},
    },
    loop=mamba_loop,
    linear_modules={"in_proj", "x_proj", "dt_proj", "out_proj"},
    kernel=("modeling_stateful_mamba", "KERNEL_AVAILABLE"),
    conv_module="conv1d",
)

FALCON_MAMBA = MAMBA._replace(
    name="falcon_mamba",
    fields=MAMBA.fields | {"mixer_rms_eps": 1e-6},
    variants={"norms": {}, "large epsilon": {"mixer_rms_eps": 0.3}},
)
