"""GLA, HGRN-2 and linear attention as families under test."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, logsigmoid, relu, silu

from hf_recurrent_lengthgen.models.modeling_stateful_gla import StatefulGLAForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_hgrn2 import StatefulHGRN2ForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_linear_attention import StatefulLinearAttentionForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .family import Family

SMALL = {"intermediate_size": 24, "num_heads": 2}
MLP = {"gate_proj", "up_proj", "down_proj"}


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def convolve(modules: list[Any], inputs: list[Tensor], columns: Tensor) -> tuple[list[Tensor], Tensor]:
    """One token through short convolutions without bias or activation; columns: (B, all channels, K-1)."""
    window = torch.cat([columns, torch.cat(inputs, -1)[..., None]], -1)
    outputs = (window * torch.cat([module.weight[:, 0] for module in modules])).sum(-1)
    return list(outputs.split([x.shape[-1] for x in inputs], -1)), window[..., 1:]


def fla_loop(token: Any, model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Logits and final state with `token` (layer index, mixer, normed x_t, S, columns) -> (output, S, columns)."""
    final = []
    for index, (block, (S, columns)) in enumerate(zip(model.model.layers, state, strict=True)):
        outputs = []
        for t in range(x.shape[1]):
            normed = rms(x[:, t], model.config.norm_eps, block.attn_norm.weight)
            output, S, columns = token(index, block.attn, normed, S, columns)
            h = x[:, t] + output
            m, normed = block.mlp, rms(h, model.config.norm_eps, block.mlp_norm.weight)
            outputs.append(h + m.down_proj(silu(m.gate_proj(normed)) * m.up_proj(normed)))
        x = torch.stack(outputs, 1)
        final.append(LayerState(S, columns))
    return model.lm_head(rms(x, model.config.norm_eps, model.model.norm.weight)), tuple(final)


def attend(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} diag(decay) + v k^T and y = S_t q, by head."""
    S = torch.einsum("bhpn,bhn->bhpn", S, decay) + torch.einsum("bhp,bhn->bhpn", v, k)
    return torch.einsum("bhpn,bhn->bhp", S, q), S


def gla_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Section 4.4 of arXiv:2312.06635; x: (B, T, D)."""
    c = model.config

    def token(index: int, m: Any, x: Tensor, S: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, kv = S.shape[1], c.num_kv_heads or S.shape[1]
        q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
        if c.use_short_conv:
            (q, k, v), columns = convolve([m.q_conv1d, m.k_conv1d, m.v_conv1d], [q, k, v], columns)
            q, k, v = silu(q), silu(k), silu(v)
        if c.feature_map == "relu":
            q, k = relu(q), relu(k)
        elif c.feature_map == "gelu":
            q, k = gelu(q, approximate="tanh"), gelu(k, approximate="tanh")
        g = logsigmoid(m.gk_proj[0](x) @ m.gk_proj[1].weight.T + m.gk_proj[1].bias) / c.gate_logit_normalizer
        g = g if c.clamp_min is None else torch.maximum(g, torch.full_like(g, c.clamp_min))
        q = q.unflatten(-1, (H, -1))
        k, v, g = (part.unflatten(-1, (kv, -1)).repeat_interleave(H // kv, 1) for part in (k, v, g))
        y, S = attend(S, q * q.shape[-1] ** -0.5, k, v, g.exp())
        norm = m.g_norm_swish_gate if c.fuse_norm and c.use_output_gate else m.g_norm
        y = rms(y, c.norm_eps, norm.weight).flatten(1)
        return m.o_proj(y * silu(m.g_proj(x)) if c.use_output_gate else y), S, columns

    return fla_loop(token, model, x, state)


def hgrn2_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Eq. 6 and 7 of arXiv:2404.07904; x: (B, T, D)."""
    c = model.config

    def token(index: int, m: Any, x: Tensor, S: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, f, i = m.q_proj(x), m.f_proj(x), m.i_proj(x)
        if c.use_short_conv:
            (q, f, i), columns = convolve([m.q_conv1d, m.f_conv1d, m.i_conv1d], [q, f, i], columns)
        f = torch.sigmoid(f)
        if c.use_lower_bound:
            shares = model.model.lower_bounds.softmax(0)
            bound = shares[1 : index + 1].sum(0)
            f = bound + (1 - bound) * f
        q, f, i = (part.unflatten(-1, (S.shape[1], -1)) for part in (silu(q), f, i))
        y, S = attend(S, q * q.shape[-1] ** -0.5, 1 - f, i, f)
        return m.o_proj(rms(y.flatten(1), 1e-5, m.g_norm.weight)), S, columns

    return fla_loop(token, model, x, state)


def linear_attention_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Eq. 18 to 20 of arXiv:2006.16236, the sum of keys as the last row of the state; x: (B, T, D)."""
    c = model.config

    def mapped(module: Any, x: Tensor) -> Tensor:
        match c.feature_map:
            case "elementwise_product":
                return module.layer1(x) * module.layer2(x)
            case "hedgehog":
                z = module.layer(x)
                return torch.cat([2 * z, -2 * z], -1).softmax(-1)
            case "elu":
                return torch.where(x >= 0, x + 1, x.exp())
            case "dpfp":
                x = torch.cat([relu(x), relu(-x)], -1)
                return torch.cat(
                    [x * x[..., [(n - j) % x.shape[-1] for n in range(x.shape[-1])]] for j in (1, 2, 3, 4)], -1
                )
            case "t2r":
                return relu(module.layer(x))
        raise AssertionError(c.feature_map)

    def token(index: int, m: Any, x: Tensor, S: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, kv = S.shape[1], c.num_kv_heads or S.shape[1]
        q = mapped(m.feature_map_q, m.q_proj(x).unflatten(-1, (H, -1)))
        k = mapped(m.feature_map_k, m.k_proj(x).unflatten(-1, (kv, -1))).repeat_interleave(H // kv, 1)
        v = m.v_proj(x).unflatten(-1, (kv, -1)).repeat_interleave(H // kv, 1)
        q = q / (q.sum(-1, keepdim=True) + 1e-4) if c.norm_q else q
        k = k / (k.sum(-1, keepdim=True) + 1e-4) if c.norm_k else k
        scale = q.shape[-1] ** -0.5
        z = S[:, :, -1:]
        y, S_v = attend(S[:, :, :-1] if c.norm_feature_map else S, scale * q, k, v, torch.ones_like(k))
        if c.norm_feature_map:
            z = z + k[:, :, None]
            y = y / ((scale * q[:, :, None] * z).sum(-1) + 1e-10)
            S_v = torch.cat([S_v, z], 2)
        return m.o_proj(rms(y, c.norm_eps, m.norm.weight).flatten(1)), S_v, columns

    return fla_loop(token, model, x, state)


GLA = Family(
    name="gla",
    causal_lm_class=StatefulGLAForCausalLM,
    fields=SMALL | {"gate_low_rank_dim": 3, "gate_logit_normalizer": 2},
    variants={
        "default": {},
        "short convolutions, gelu, grouped heads": {
            "use_short_conv": True,
            "feature_map": "gelu",
            "num_kv_heads": 1,
            "conv_size": 3,
        },
        "own heads in each layer, clamped, no gate, tied": {
            "layer_num_heads": [4, 1],
            "clamp_min": -0.2,
            "use_output_gate": False,
            "tie_word_embeddings": True,
        },
        "strong gates": {"gate_logit_normalizer": 0.01, "fuse_norm": False},
    },
    loop=gla_loop,
    linear_modules={"q_proj", "k_proj", "v_proj", "gk_proj.0", "gk_proj.1", "g_proj", "o_proj"} | MLP,
    kernel=("modeling_stateful_gla", "chunk_gla"),
    autocast_error=0.2,  # its gates and squared channels multiply bfloat16's errors
)
HGRN2 = Family(
    name="hgrn2",
    causal_lm_class=StatefulHGRN2ForCausalLM,
    fields=SMALL | {"expand_ratio": None},
    variants={
        "default": {},
        "short convolutions, no bounds": {"use_short_conv": True, "use_lower_bound": False},
        "own heads in each layer": {"layer_num_heads": [1, 4]},
    },
    loop=hgrn2_loop,
    linear_modules={"q_proj", "f_proj", "i_proj", "o_proj"} | MLP,
    kernel=("modeling_stateful_hgrn2", "chunk_gla"),
)
LINEAR_ATTENTION = Family(
    name="linear_attention",
    causal_lm_class=StatefulLinearAttentionForCausalLM,
    fields=SMALL,
    variants={
        "default": {},
        "hedgehog, normalized": {"feature_map": "hedgehog", "norm_feature_map": True, "num_kv_heads": 1},
        "elu, normalized keys": {"feature_map": "elu", "norm_q": True, "norm_k": True},
        "dpfp": {"feature_map": "dpfp", "expand_k": 0.5},
        "t2r": {"feature_map": "t2r", "layer_num_heads": [1, 4]},
    },
    loop=linear_attention_loop,
    linear_modules={"q_proj", "k_proj", "v_proj", "o_proj"}
    | {f"feature_map_{side}.layer{index}" for side in "qk" for index in (1, 2)}
    | MLP,
    kernel=("modeling_stateful_linear_attention", "chunk_gla"),
    autocast_error=0.2,
)
