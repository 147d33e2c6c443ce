"""RWKV-5, RWKV-6 and RWKV-7 as families under test."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import group_norm, relu, silu

from hf_recurrent_lengthgen.models.modeling_stateful_rwkv5 import StatefulRWKV5ForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv6 import StatefulRWKV6ForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv7 import StatefulRWKV7ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .family import Family


def wkv(S: Tensor, r: Tensor, k: Tensor, v: Tensor, decay: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 19 of arXiv:2404.05892 by head: the bonus u only for the current token; (B, H*P) and the next state."""
    r, k, v, decay = (part.unflatten(-1, (S.shape[1], -1)) for part in (r, k, v, decay))
    kv = torch.einsum("bhp,bhn->bhpn", v, k)
    y = torch.einsum("bhpn,bhn->bhp", S + kv * u[:, None], r)
    return y.flatten(1), S * decay[:, :, None] + kv


def rwkv6_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Section 4 of arXiv:2404.05892, on fla's parameters; x: (B, T, D)."""
    c = model.config
    D, R = c.hidden_size, c.proj_low_rank_dim
    final = []
    for block, (S, conv) in zip(model.model.layers, state, strict=True):
        before, before_ffn, outputs, m, f = conv[:, :D, 0], conv[:, D:, 0], [], block.attn, block.ffn
        for t in range(x.shape[1]):
            h = block.pre_norm(x[:, t])
            z = block.attn_norm(h)
            d = before - z
            low = torch.tanh((z + d * m.x_proj[0].mu) @ m.x_proj[0].linear.weight.T)
            mixed = [
                z + d * (low[:, n * R : (n + 1) * R] @ m.x_proj[2].weight[:, n * R : (n + 1) * R].T + m.x_bias[n])
                for n in range(5)
            ]
            r, k, v, g = (
                mixed[n] @ p.linear.weight.T for n, p in ((0, m.r_proj), (2, m.k_proj), (3, m.v_proj), (4, m.g_proj))
            )
            down, _, up = m.w_proj.linear.lora
            w = torch.tanh(mixed[1] @ down.weight.T) @ up.weight.T + up.bias
            y, S = wkv(S, r, k, v, torch.exp(-torch.exp(w)), m.bonus)
            eps = c.norm_eps if c.group_norm_eps is None else c.group_norm_eps
            y = group_norm(y, S.shape[1], m.g_norm.weight, m.g_norm.bias, eps)
            h = h + (y * silu(g)) @ m.o_proj.weight.T
            before, z = z, block.ffn_norm(h)
            d = before_ffn - z
            key = relu((z + d * f.key.mu) @ f.key.linear.weight.T) ** 2
            gate = torch.sigmoid((z + d * f.receptance.mu) @ f.receptance.linear.weight.T)
            before_ffn = z
            outputs.append(h + gate * (key @ f.value.weight.T))
        x = torch.stack(outputs, 1)
        final.append(LayerState(S, torch.cat([before, before_ffn], 1)[..., None]))
    return model.lm_head(model.model.norm(x)), tuple(final)


def rwkv5_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Section 4 of arXiv:2404.05892 (Eagle), on the official parameters; x: (B, T, D)."""
    c = model.config
    D = c.hidden_size
    final = []
    for index, (block, (S, conv)) in enumerate(zip(model.rwkv.blocks, state, strict=True)):
        before, before_ffn, outputs = conv[:, :D, 0], conv[:, D:, 0], []
        m, f = block.attention, block.feed_forward
        for t in range(x.shape[1]):
            h = block.pre_ln(x[:, t]) if index == 0 else x[:, t]
            z = block.ln1(h)

            def mix(mu: Tensor, now: Tensor = z, then: Tensor = before) -> Tensor:
                return now * mu[0, 0] + then * (1 - mu[0, 0])

            r, k, v = (
                mix(mu) @ p.weight.T
                for mu, p in (
                    (m.time_mix_receptance, m.receptance),
                    (m.time_mix_key, m.key),
                    (m.time_mix_value, m.value),
                )
            )
            decay = torch.exp(-torch.exp(m.time_decay)).flatten().expand_as(k)
            y, S = wkv(S, r, k, v, decay, m.time_faaaa)
            y = group_norm(y / c.head_size_divisor, S.shape[1], m.ln_x.weight, m.ln_x.bias, 1e-5)
            h = h + (y * silu(mix(m.time_mix_gate) @ m.gate.weight.T)) @ m.output.weight.T
            before, z = z, block.ln2(h)
            key = relu(mix(f.time_mix_key, z, before_ffn) @ f.key.weight.T) ** 2
            gate = torch.sigmoid(mix(f.time_mix_receptance, z, before_ffn) @ f.receptance.weight.T)
            before_ffn = z
            outputs.append(h + gate * (key @ f.value.weight.T))
        x = torch.stack(outputs, 1)
        final.append(LayerState(S, torch.cat([before, before_ffn], 1)[..., None]))
    return model.head(model.rwkv.ln_out(x)), tuple(final)


def rwkv7_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Section 4 of arXiv:2503.14456, on fla's parameters, with transitions as matrices; x: (B, T, D)."""
    c = model.config
    D = c.hidden_size
    final: list[LayerState] = []
    first: list[Tensor] = []  # values of the first layer
    for block, (S, conv) in zip(model.model.layers, state, strict=True):
        H, _, N = S.shape[1:]
        before, before_ffn, outputs, m, f = conv[:, :D, 0], conv[:, D:, 0], [], block.attn, block.ffn

        def low(lora: Any, z: Tensor, f: Any = lambda z: z) -> Tensor:
            down, _, up = lora.lora
            return f(z @ down.weight.T) @ up.weight.T + (0 if up.bias is None else up.bias)

        for t in range(x.shape[1]):
            h = block.pre_norm(x[:, t])
            z = block.attn_norm(h)
            mixed = {part: z + (before - z) * getattr(m, f"x_{part}")[0, 0] for part in "rwkvag"}
            r, k, v = (mixed[part] @ getattr(m, f"{part}_proj").weight.T for part in "rkv")
            if final:
                v = v + (first[t] - v) * torch.sigmoid(low(m.v_lora, mixed["v"]))
            else:
                first.append(v)
            a = torch.sigmoid(low(m.a_lora, mixed["a"]))
            w = torch.exp(-(torch.e**-0.5) * torch.sigmoid(low(m.w_lora, mixed["w"], torch.tanh)))
            g = low(m.g_lora, mixed["g"], torch.sigmoid)
            kappa = (k * m.k_k).unflatten(-1, (H, N))
            kappa = kappa / kappa.norm(dim=-1, keepdim=True)
            k = k * (1 - m.k_a) + k * a * m.k_a
            r, k, v, a, w = (part.unflatten(-1, (H, -1)) for part in (r, k, v, a, w))
            transition = torch.diag_embed(w) - kappa[..., :, None] * (a * kappa)[..., None, :]
            S = S @ transition + v[..., :, None] * k[..., None, :]
            eps = N * c.norm_eps if c.group_norm_eps is None else c.group_norm_eps
            y = group_norm((S @ r[..., None]).flatten(1), H, m.g_norm.weight, m.g_norm.bias, eps)
            y = y + ((r * k * m.r_k).sum(-1, keepdim=True) * v).flatten(1)
            h = h + (y * g) @ m.o_proj.weight.T
            before, z = z, block.ffn_norm(h)
            key = relu((z + (before_ffn - z) * f.x_k) @ f.key.weight.T) ** 2
            before_ffn = z
            outputs.append(h + key @ f.value.weight.T)
        x = torch.stack(outputs, 1)
        final.append(LayerState(S, torch.cat([before, before_ffn], 1)[..., None]))
    return model.lm_head(model.model.norm(x)), tuple(final)


RWKV6 = Family(
    name="rwkv6",
    causal_lm_class=StatefulRWKV6ForCausalLM,
    fields={"num_heads": 2, "intermediate_size": 24, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5},
    variants={
        "default": {},
        "own epsilon, tied": {"group_norm_eps": 64e-5, "expand_k": 1, "num_heads": 4, "tie_word_embeddings": True},
        "plain norms": {"norm_first": False, "norm_bias": False},
        "own heads in each layer": {"layer_num_heads": [1, 4]},
    },
    loop=rwkv6_loop,
    linear_modules={
        *(f"{name}.linear" for name in ("r_proj", "k_proj", "v_proj", "g_proj", "x_proj.0", "key", "receptance")),
        *("x_proj.2", "lora.0", "lora.2", "o_proj", "ffn.value"),
    },
    kernel=("modeling_stateful_rwkv6", "chunk_rwkv6"),
    autocast_error=0.2,  # its decays are exponentials of exponentials of bfloat16
)
RWKV5 = Family(
    name="rwkv5",
    causal_lm_class=StatefulRWKV5ForCausalLM,
    fields={"head_size": 8, "intermediate_size": 24},
    variants={
        "default": {},
        "wide, no divisor": {"attention_hidden_size": 32, "head_size_divisor": 1},
        "own heads in each layer": {"layer_num_heads": [4, 1]},
    },
    loop=rwkv5_loop,
    linear_modules={
        *(f"attention.{name}" for name in ("key", "value", "receptance", "gate", "output")),
        *(f"feed_forward.{name}" for name in ("key", "value", "receptance")),
    },
    kernel=("modeling_stateful_rwkv5", "chunk_rwkv6"),
)
RWKV7 = Family(
    name="rwkv7",
    causal_lm_class=StatefulRWKV7ForCausalLM,
    fields={
        **{"head_dim": 8, "intermediate_size": 24},
        **{"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 2, "v_low_rank_dim": 4},
    },
    variants={
        "default": {},
        "wide values, three layers with heads of their own, tied": {
            "value_dim": 32,
            "layer_num_heads": [4, 1, 2],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
        "plain norms, own epsilon, one layer": {
            "norm_first": False,
            "norm_bias": False,
            "group_norm_eps": 64e-5,
            "num_hidden_layers": 1,
        },
    },
    loop=rwkv7_loop,
    linear_modules={
        *("r_proj", "k_proj", "v_proj", "o_proj", "lora.0", "lora.2", "ffn.key", "ffn.value"),
    },
    kernel=("modeling_stateful_rwkv7", "chunk_dplr_delta_rule"),
)
