"""The model families under test; a family added here runs through every test of this folder."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .family import VOCABULARY, Family
from .family_delta import DELTA_NET, GATED_DELTANET, KDA
from .family_fla import GLA, HGRN2, LINEAR_ATTENTION
from .family_mamba import FALCON_MAMBA, MAMBA
from .family_mamba3 import MAMBA3
from .family_rwkv import RWKV5, RWKV6, RWKV7


def mamba2_loop(model: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """Logits and final state of a Mamba-2 model, one token at a time from the equations; x: (B, T, D)."""
    c = model.config
    H, P, G = c.num_heads, c.head_dim, c.n_groups

    def rms(v: Tensor, groups: int = 1) -> Tensor:
        v = v.unflatten(-1, (groups, -1))
        return (v / (v.square().mean(-1, keepdim=True) + c.layer_norm_epsilon).sqrt()).flatten(-2)

    final = []
    for block, (h, columns) in zip(model.backbone.layers, state, strict=True):
        m, outputs, N = block.mixer, [], h.shape[-1]
        for t in range(x.shape[1]):
            z, xBC, dt = m.in_proj(block.norm.weight * rms(x[:, t])).split([H * P, H * P + 2 * G * N, H], -1)
            window = torch.cat([columns, xBC[..., None]], -1)  # (B, C, K)
            bias = 0 if m.conv1d.bias is None else m.conv1d.bias
            u, B, C = silu((window * m.conv1d.weight[:, 0]).sum(-1) + bias).split([H * P, G * N, G * N], -1)
            u, columns = u.unflatten(-1, (H, P)), window[..., 1:]
            B, C = (v.unflatten(-1, (G, N)).repeat_interleave(H // G, dim=1) for v in (B, C))  # (B, H, N)
            dt = softplus(dt + m.dt_bias).clamp(*c.time_step_limit)
            decay = torch.exp(-dt * torch.exp(m.A_log))
            h = decay[..., None, None] * h + torch.einsum("bh,bhp,bhn->bhpn", dt, u, B)
            y = torch.einsum("bhpn,bhn->bhp", h, C) + m.D[:, None] * u
            outputs.append(m.out_proj(m.norm.weight * rms(y.flatten(1) * silu(z), G)))
        x = x + torch.stack(outputs, 1)
        final.append(LayerState(h, columns))
    return model.lm_head(model.backbone.norm_f.weight * rms(x)), tuple(final)


MAMBA2 = Family(
    name="mamba2",
    causal_lm_class=StatefulMamba2ForCausalLM,
    fields={
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 5,
        "n_groups": 2,
        "chunk_size": 16,
        "residual_in_fp32": False,
    },
    variants={
        "one group": {"n_groups": 1},
        "two groups": {},
        "own state size in each layer": {"layer_state_sizes": [12, 3]},
        "step limits": {"time_step_limit": (0.2, 0.7)},
        "two taps, no biases": {"n_groups": 1, "conv_kernel": 2, "use_conv_bias": False},
        "biases, fp32 residual, tied": {
            "n_groups": 4,
            "use_bias": True,
            "residual_in_fp32": True,
            "tie_word_embeddings": True,
        },
    },
    loop=mamba2_loop,
    linear_modules={"in_proj", "out_proj"},
    kernel=("modeling_stateful_mamba2", "KERNEL_AVAILABLE"),
    conv_module="conv1d",
)

# What they write depends on what they read: they do not forget at inference, and their states do not grow.
DELTA_FAMILIES = [DELTA_NET, GATED_DELTANET, KDA, RWKV7]
FAMILIES = [MAMBA2, MAMBA, FALCON_MAMBA, GLA, HGRN2, LINEAR_ATTENTION, RWKV6, RWKV5, MAMBA3, *DELTA_FAMILIES]
# The states of Mamba-3 do not grow, and have no window.
GROWING = [family for family in FAMILIES if family is not MAMBA3]
DECAYING = [family for family in GROWING if family not in DELTA_FAMILIES]
# For what the shell does alike for all: two kinds of convolution states and none.
SHELL_FAMILIES = [MAMBA2, GLA, RWKV6]
VARIANTS = [(family, variant) for family in FAMILIES for variant in family.variants]


def variant_id(value: object) -> str:
    """Test ids for `parametrize(("family", "variant"), VARIANTS, ids=variant_id)`."""
    return value.name if isinstance(value, Family) else str(value)


def build(family: Family, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model whose parameters are all away from their neutral initial values, in eval mode."""
    torch.manual_seed(seed)
    return perturb(family.causal_lm_class(family.config(**changes))).to(dtype).eval()


@torch.no_grad()
def perturb(model: nn.Module) -> Any:
    """Move every parameter, so that a forgotten bias, weight or norm changes the output."""
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def randomized(model: Any, seed: int = 0, std: float = 1.0) -> Any:
    """Every parameter random, so that none has a value by chance."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model


def random_state(model: Any, batch_size: int, seed: int = 1, scale: float = 0.5) -> RecurrentState:
    """A state of nonzero values in every entry."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        LayerState(*((scale * torch.randn(part.shape, generator=generator)).to(part.dtype) for part in layer))
        for layer in model.zero_state(batch_size)
    )


def random_tokens(batch_size: int, length: int, seed: int = 2) -> Tensor:
    """Token ids without the special ones 0, 1 and 2."""
    return torch.randint(3, VOCABULARY, (batch_size, length), generator=torch.Generator().manual_seed(seed))
