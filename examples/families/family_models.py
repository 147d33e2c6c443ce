"""The models of the study of families: configurations, and the initializations with which they fail at this size."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import BambaConfig, FalconH1Config, GraniteMoeHybridConfig, Qwen3NextConfig, Zamba2Config

from hf_recurrent_lengthgen.checkpoints.records import InitialWeights
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv7 import DECAY_RATE
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.surgery.mimetic import DELTA_BIAS

C = 5.0
"""Strength of slow decays: a rate u is (u + 1)^-5 per token, of u = 1, 2, ... or as the model has it."""
SHARED = {"hidden_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
MAMBA = {"initialization": "mamba-ssm"}
HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192, "num_hidden_layers": 3}

HYBRID_MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
HYBRID_MAMBA2 |= {"mamba_chunk_size": 64}


class Start(NamedTuple):
    """An initialization: a change to the random weights of a new model, and its record."""

    change: Callable[[Any], None]
    weights: InitialWeights


def mimetic(model: Any) -> None:
    """No decay, step sizes of 1, queries like keys."""
    mimetic_initialization(model, c=C, offset=1)


@torch.no_grad()
def rwkv_decays(model: Any) -> None:
    """The decays of RWKV-LM, RWKV-v5/src/model.py, class RWKV_Tmix_x060; fla starts all at exp(-exp(-1))."""
    layers = model.model.layers
    for index, layer in enumerate(layers):
        bias = layer.attn.w_proj.linear.lora[2].bias
        place = torch.arange(len(bias)) / (len(bias) - 1)
        bias.copy_(-6 + 5 * place ** (0.7 + 1.3 * index / (len(layers) - 1)))


@torch.no_grad()
def slow_rwkv(model: Any) -> None:
    """In RWKV-5, RWKV-6 and RWKV-7 the decays that mimetic initialization gives the keys of GLA."""
    for module in model.modules():
        if hasattr(module, "time_decay"):  # RWKV-5: (heads, keys)
            module.time_decay.copy_(-C * (torch.arange(module.time_decay.shape[-1]) + 2.0).log())
        elif hasattr(module, "w_proj"):  # RWKV-6: (heads keys,), and `bonus` (heads, keys)
            heads, keys = module.bonus.shape
            module.w_proj.linear.lora[2].bias.copy_((-C * (torch.arange(keys) + 2.0).log()).repeat(heads))
        elif hasattr(module, "w_lora"):  # RWKV-7: as RWKV-6, exp(-DECAY_RATE * sigmoid), and `r_k` (heads, keys)
            heads, keys = module.r_k.shape
            module.w_lora.bias.copy_(torch.logit((torch.arange(keys) + 2.0) ** -C / DECAY_RATE).repeat(heads))


@torch.no_grad()
def slow_bound(model: Any) -> None:
    """The bound of HGRN-2's last layer near 1; the first layer has none by construction."""
    model.model.lower_bounds[-1] = 8.0


@torch.no_grad()
def slow_delta(model: Any) -> None:
    """The decays and step sizes of mimetic initialization in gated delta layers."""
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.copy_(-C * (torch.arange(len(module.A_log)) + 2.0).log())
            module.dt_bias.fill_(DELTA_BIAS)


MIMETIC = Start(mimetic, InitialWeights({"c": C, "offset": 1}))
RWKV_DECAYS = Start(
    rwkv_decays, InitialWeights(changed="decays of the authors' training code, exp(-exp(-6)) to exp(-exp(-1))")
)
SLOW_RWKV = Start(slow_rwkv, InitialWeights(changed="decays of exp(-(n + 1)^-5) in key n = 1, 2, ... of each head"))
SLOW_BOUND = Start(slow_bound, InitialWeights(changed="the last layer forgets at most 0.0003 per token"))
SLOW_DELTA = Start(slow_delta, InitialWeights(changed="decays of exp(-(h + 1)^-5) in head h = 1, 2, ..."))


@dataclass(frozen=True)
class Family:
    """How its base is initialized and trained: `config` holds what differs from `SHARED`, `start` changes a new model.

    `longer` multiplies the steps of the base; `shorter` divides the training length T and multiplies the batch size.
    """

    label: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    start: Start | None = None
    learning_rate: float = 4e-3
    longer: int = 1
    shorter: int = 1


MAMBA2 = Family(
    "Mamba-2",
    "stateful_mamba2",
    {**MAMBA, "head_dim": 32, "num_heads": 6, "state_size": 32, "n_groups": 1},
    MIMETIC,
)
MAMBA1 = Family("Mamba-1", "stateful_mamba", {**MAMBA, "state_size": 16}, MIMETIC)
GATED = {"num_heads": 3, "expand_k": 1.0, "expand_v": 1.0}
DELTA_NET = Family("DeltaNet", "stateful_delta_net", {"num_heads": 3})
GATED_DELTANET = Family(
    "Gated DeltaNet", "stateful_gated_deltanet", {"num_heads": 3, "head_dim": 32, "expand_v": 1.0}, SLOW_DELTA
)
RWKV6 = Family("RWKV-6", "stateful_rwkv6", GATED, SLOW_RWKV)
RWKV7 = Family("RWKV-7", "stateful_rwkv7", {"head_dim": 32}, SLOW_RWKV)
RWKV5 = Family("RWKV-5", "stateful_rwkv5", {"head_size": 32}, SLOW_RWKV)
FAMILIES = {
    "mamba2": MAMBA2,
    "mamba2_default": replace(MAMBA2, label="Mamba-2, T = 64", start=None, longer=4, shorter=2),
    "mamba2_large_default": replace(
        MAMBA2,
        label="Mamba-2, T = 16, N = 128",
        config=MAMBA2.config | {"state_size": 128},
        start=None,
        longer=4,
        shorter=8,
    ),
    "mamba2_long_default": replace(
        MAMBA2,
        label="Mamba-2, T = 64, width 64, 20 million bytes",
        config=MAMBA2.config | {"hidden_size": 64, "num_heads": 4},
        start=None,
        longer=10,
        shorter=2,
    ),
    "mamba": MAMBA1,
    "mamba_default": replace(
        MAMBA1,
        label="Mamba-1, T = 64, width 64",
        config=MAMBA1.config | {"hidden_size": 64},
        start=None,
        longer=4,
        shorter=2,
    ),
    "falcon_mamba": Family(
        "FalconMamba", "stateful_mamba", {**MAMBA, "state_size": 16, "mixer_rms_eps": 1e-6}, MIMETIC
    ),
    "gla": Family("GLA", "stateful_gla", GATED, MIMETIC),
    "rwkv6": RWKV6,
    "rwkv6_default": replace(RWKV6, label="RWKV-6, T = 64", start=RWKV_DECAYS, longer=2, shorter=2),
    "rwkv5": RWKV5,
    "rwkv5_default": replace(RWKV5, label="RWKV-5, T = 64", start=None, longer=2, shorter=2),
    "rwkv7": RWKV7,
    "rwkv7_default": replace(RWKV7, start=None),
    "hgrn2": Family("HGRN-2", "stateful_hgrn2", {"expand_ratio": 32}, SLOW_BOUND),
    "delta_net": DELTA_NET,
    "delta_net_negative": replace(
        DELTA_NET, label="DeltaNet, negative eigenvalues", config=DELTA_NET.config | {"allow_neg_eigval": True}
    ),
    "gated_deltanet": GATED_DELTANET,
    "gated_deltanet_negative": replace(
        GATED_DELTANET,
        label="Gated DeltaNet, negative eigenvalues",
        config=GATED_DELTANET.config | {"allow_neg_eigval": True},
    ),
    "gated_deltanet_default": replace(GATED_DELTANET, start=None),
    "kda": Family("Kimi Delta Attention", "stateful_kda", {"num_heads": 3, "head_dim": 32}, SLOW_DELTA),
    "bamba": Family(
        "Bamba (Mamba-2 and attention)", "bamba", {**HYBRID, **HYBRID_MAMBA2, "attn_layer_indices": [1]}, MIMETIC
    ),
    "falcon_h1": Family(
        "Falcon-H1 (Mamba-2 and attention in each layer)",
        "falcon_h1",
        {**HYBRID, **HYBRID_MAMBA2, "mamba_d_ssm": 192, "head_dim": 24},
        MIMETIC,
    ),
    "granite": Family(
        "Granite 4 (Mamba-2, and attention without positions)",
        "granitemoehybrid",
        {
            **HYBRID,
            **HYBRID_MAMBA2,
            **{"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 192},
            **{"num_local_experts": 0, "position_embedding_type": "nope"},
        },
        MIMETIC,
    ),
    "zamba2": Family(
        "Zamba2 (Mamba-2, and attention that is shared by layers)",
        "zamba2",
        {
            **HYBRID,
            **{"n_mamba_heads": 6, "mamba_headdim": 32, "mamba_d_state": 32, "mamba_ngroups": 1, "mamba_expand": 2},
            **{"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_mem_blocks": 1},
            **{"chunk_size": 64, "adapter_rank": 16, "use_mem_rope": True},
        },
        MIMETIC,
    ),
    "qwen3_next": Family(
        "Qwen3-Next (delta rule and attention)",
        "qwen3_next",
        {
            **HYBRID,
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 32},
            **{"linear_value_head_dim": 32, "head_dim": 24, "mlp_only_layers": [0, 1, 2]},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        SLOW_DELTA,
    ),
}
SHORT = 8
"""`shorter` of the second training length of the delta rule: 16, half of the keys of a head."""
FAMILIES |= {
    f"{name}_short": replace(family, label=f"{family.label}, T = 16", shorter=SHORT)
    for name, family in FAMILIES.items()
    if name.startswith(("rwkv7", "delta_net", "gated_deltanet", "kda", "qwen3_next"))
}
STOCK = {
    "bamba": BambaConfig,
    "falcon_h1": FalconH1Config,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "qwen3_next": Qwen3NextConfig,
    "zamba2": Zamba2Config,
}
