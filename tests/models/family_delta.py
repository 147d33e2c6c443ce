"""DeltaNet, Gated DeltaNet and Kimi Delta Attention as families under test."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, relu, silu, softplus

from hf_recurrent_lengthgen.models.modeling_stateful_delta_net import StatefulDeltaNetForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_gated_deltanet import StatefulGatedDeltaNetForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_kda import StatefulKDAForCausalLM
from hf_recurrent_lengthgen.models.state_value import RecurrentState

from .family import Family
from .family_fla import MLP, SMALL, convolve, fla_loop, rms

HEADS = {"intermediate_size": 24, "num_heads": 2, "head_dim": 6}
Gates = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def erase_and_write(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} diag(decay) (I - beta k k^T) + beta v k^T and y = S_t q, by head."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    kept = eye - beta[..., None, None] * torch.einsum("bhm,bhn->bhmn", k, k)
    S = torch.einsum("bhpm,bhm,bhmn->bhpn", S, decay, kept) + beta[..., None, None] * torch.einsum(
        "bhp,bhn->bhpn", v, k
    )
    return torch.einsum("bhpn,bhn->bhp", S, q), S


def delta_loop(model: Any, x: Tensor, state: RecurrentState, gates: Gates) -> tuple[Tensor, RecurrentState]:
    """`gates` (mixer, x_t) -> decay (B, H, N or 1) and output gate (B, H*P)."""
    c = model.config

    def token(index: int, m: Any, x: Tensor, S: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [m.q_proj(x), m.k_proj(x), m.v_proj(x)]
        if c.use_short_conv:
            parts, columns = convolve([m.q_conv1d, m.k_conv1d, m.v_conv1d], parts, columns)
        q, k, v = parts[0], parts[1], silu(parts[2])
        q, k = {"silu": (silu(q), silu(k)), "relu": (relu(q), relu(k)), "elu": (elu(q) + 1, elu(k) + 1)}[
            getattr(c, "qk_activation", "silu")
        ]
        H = S.shape[1]
        N, key_heads = S.shape[3], q.shape[-1] // S.shape[3]
        q, k = (part.unflatten(-1, (key_heads, N)).repeat_interleave(H // key_heads, 1) for part in (q, k))
        if getattr(c, "qk_norm", "l2") == "l2":
            q, k = unit(q), unit(k)
        else:
            q, k = q / q.abs().sum(-1, keepdim=True), k / k.abs().sum(-1, keepdim=True)
        beta = torch.sigmoid(m.b_proj(x)) if getattr(c, "use_beta", True) else torch.ones_like(q[..., 0])
        decay, gate = gates(m, x)
        rate = 2 * beta if c.allow_neg_eigval else beta
        y, S = erase_and_write(S, q * N**-0.5, k, v.unflatten(-1, (H, -1)), decay.expand_as(q), rate)
        return m.o_proj(rms(y, c.norm_eps, m.o_norm.weight).flatten(1) * gate), S, columns

    return fla_loop(token, model, x, state)


def delta_net_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Eq. 1 of arXiv:2406.06484; x: (B, T, D)."""

    def gates(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = silu(m.g_proj(x)) if model.config.use_gate else torch.ones(())
        return torch.ones(1, 1, 1, dtype=x.dtype), gate.to(x.dtype)

    return delta_loop(model, x, state, gates)


def gated_deltanet_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Eq. 10 of arXiv:2412.06464; x: (B, T, D)."""
    c = model.config

    def gates(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(-torch.exp(m.A_log) * softplus(m.a_proj(x) + m.dt_bias))
        if not c.use_gate:
            return decay[..., None], torch.ones((), dtype=x.dtype)
        return decay[..., None], (torch.sigmoid if c.output_gate_activation == "sigmoid" else silu)(m.g_proj(x))

    return delta_loop(model, x, state, gates)


def kda_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Eq. 1 of arXiv:2510.26692; x: (B, T, D)."""
    bound = model.config.lower_bound

    def gates(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        step = m.f_proj[1](m.f_proj[0](x)) + m.dt_bias
        step, rate = step.unflatten(-1, (len(m.A_log), -1)), torch.exp(m.A_log)[:, None]
        log_decay = -rate * softplus(step) if bound is None else bound * torch.sigmoid(rate * step)
        return log_decay.exp(), torch.sigmoid(m.g_proj[1](m.g_proj[0](x)))

    return delta_loop(model, x, state, gates)


PROJECTIONS = {"q_proj", "k_proj", "v_proj", "b_proj", "o_proj"} | MLP
DELTA_NET = Family(
    name="delta_net",
    causal_lm_class=StatefulDeltaNetForCausalLM,
    fields=SMALL,
    variants={
        "default": {},
        "negative eigenvalues, gate, tied": {
            "allow_neg_eigval": True,
            "use_gate": True,
            "expand_k": 0.5,
            "conv_size": 3,
            "tie_word_embeddings": True,
        },
        "elu, norm 1, own heads in each layer": {
            "qk_activation": "elu",
            "qk_norm": "sum",
            "use_beta": False,
            "layer_num_heads": [4, 1],
        },
        "relu, no convolutions": {"qk_activation": "relu", "use_short_conv": False},
    },
    loop=delta_net_loop,
    linear_modules=PROJECTIONS,
    kernel=("layers_delta", "KERNEL_AVAILABLE"),
    autocast_error=0.2,
)
GATED_DELTANET = Family(
    name="gated_deltanet",
    causal_lm_class=StatefulGatedDeltaNetForCausalLM,
    fields=HEADS,
    variants={
        "default": {},
        "negative eigenvalues, shared keys, tied": {
            "allow_neg_eigval": True,
            "num_v_heads": 4,
            "output_gate_activation": "sigmoid",
            "tie_word_embeddings": True,
        },
        "no convolutions, no gate, own heads in each layer": {
            "use_short_conv": False,
            "use_gate": False,
            "expand_v": 0.5,
            "layer_num_heads": [1, 2],
        },
    },
    loop=gated_deltanet_loop,
    linear_modules=PROJECTIONS | {"a_proj", "g_proj"},
    kernel=("layers_delta", "KERNEL_AVAILABLE"),
    autocast_error=0.2,
)
KDA = Family(
    name="kda",
    causal_lm_class=StatefulKDAForCausalLM,
    fields=HEADS,
    variants={
        "default": {},
        "negative eigenvalues, shared keys, bound": {
            "allow_neg_eigval": True,
            "num_v_heads": 4,
            "lower_bound": -5.0,
            "safe_gate": True,
        },
        "no convolutions, own heads in each layer, tied": {
            "use_short_conv": False,
            "expand_v": 2.0,
            "layer_num_heads": [2, 1],
            "tie_word_embeddings": True,
        },
    },
    loop=kda_loop,
    linear_modules=PROJECTIONS | {"f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"},
    kernel=("layers_delta", "KERNEL_AVAILABLE"),
    autocast_error=0.2,
)
