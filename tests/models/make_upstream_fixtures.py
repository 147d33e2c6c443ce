"""Write tests/models/upstream: golden files of tiny flash-linear-attention (fla) models, run by fla's own code.

Run by hand, in an environment of its own (fla replaces classes that Transformers registers), no GPU needed:
pip install torch transformers safetensors einops triton "flash-linear-attention==0.6.0"
python tests/models/make_upstream_fixtures.py [name ...]

fla's layers and kernels run in Triton's interpreter, on weights drawn here: fresh fla models have zero biases and
tiny weights, which would hide mistakes. `upstream_fixtures.py` reads the files and lists their tensors.
"""

import importlib.metadata
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from tensor_groups import write_group
from torch import Tensor
from torch.nn import functional as F

ROWS, LENGTH, SPLIT = 2, 37, 21
SHARED = {
    "vocab_size": 29,
    "hidden_size": 16,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HGRN2 = {"num_heads": None, "expand_ratio": 8, "num_hidden_layers": 3}
LINEAR = {"expand_k": 0.5, "attn_mode": "chunk"}
RWKV6 = {"proj_low_rank_dim": 3, "gate_low_rank_dim": 5, "intermediate_size": 20}
RWKV7 = {"head_dim": 8, "intermediate_size": 20, "fuse_norm": False, "use_l2warp": False} | {
    f"{part}_low_rank_dim": rank for part, rank in (("decay", 3), ("gate", 5), ("a", 2), ("v", 4))
}
PLAIN = {"norm_first": False, "norm_bias": False, "norm_eps": 1e-3, "expand_k": 1.0}
DELTA = {"head_dim": 8, "expand_v": 2.0}
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "expand_v": 2.0}
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", {}),
    "gla_short_conv": ("GLA", {"use_short_conv": True}),
    "gla_grouped_heads": ("GLA", {**GROUPED, "use_short_conv": True, "conv_size": 3}),
    "gla_norm_not_fused": ("GLA", {"fuse_norm": False, "norm_eps": 1e-3}),
    "gla_no_gate": ("GLA", {"use_output_gate": False, "elementwise_affine": False}),
    "gla_clamped": ("GLA", {"clamp_min": -0.05, "feature_map": "sqrelu", "tie_word_embeddings": True}),
    "rwkv6": ("RWKV6", RWKV6),
    "rwkv6_plain_norms": ("RWKV6", {**RWKV6, **PLAIN}),
    "rwkv7": ("RWKV7", {**RWKV7, "num_hidden_layers": 3}),
    "rwkv7_plain_norms": ("RWKV7", {**RWKV7, "norm_first": False, "norm_bias": False, "norm_eps": 1e-3}),
    "rwkv7_fused": ("RWKV7", {**RWKV7, "fuse_norm": True, "use_l2warp": True, "tie_word_embeddings": True}),
    "hgrn2": ("HGRN2", HGRN2),
    "hgrn2_short_conv": ("HGRN2", {**HGRN2, "use_short_conv": True, "norm_eps": 1e-3}),
    "hgrn2_no_lower_bound": ("HGRN2", {**HGRN2, "use_lower_bound": False, "elementwise_affine": False}),
    "linear_attn": ("LinearAttention", LINEAR),
    "linear_attn_hedgehog": (
        "LinearAttention",
        {**LINEAR, **GROUPED, "feature_map": "hedgehog", "norm_feature_map": True},
    ),
    "linear_attn_t2r": (
        "LinearAttention",
        {**LINEAR, "feature_map": "t2r", "norm_q": True, "norm_k": True},
    ),
    "linear_attn_dpfp": ("LinearAttention", {**LINEAR, "feature_map": "dpfp", "norm_k": True}),
    "linear_attn_elu": ("LinearAttention", {**LINEAR, "feature_map": "elu", "norm_feature_map": True}),
    "linear_attn_relu": ("LinearAttention", {**LINEAR, "feature_map": "relu", "elementwise_affine": False}),
    "gated_deltanet": ("GatedDeltaNet", DELTA),
    "gated_deltanet_shared_keys": (
        "GatedDeltaNet",
        {**DELTA, "num_v_heads": 4, "allow_neg_eigval": True, "output_gate_activation": "sigmoid", "norm_eps": 1e-3},
    ),
    "gated_deltanet_no_conv": ("GatedDeltaNet", {**DELTA, "use_short_conv": False, "use_gate": False}),
    "delta_net": ("DeltaNet", {}),
    "delta_net_gated": ("DeltaNet", {"use_gate": True, "allow_neg_eigval": True, "expand_k": 0.5, "conv_size": 3}),
    "delta_net_sum": ("DeltaNet", {"qk_activation": "elu", "qk_norm": "sum", "use_beta": False}),
    "delta_net_relu": ("DeltaNet", {"qk_activation": "relu", "use_short_conv": False, "tie_word_embeddings": True}),
    "kda": ("KDA", {**DELTA, "expand_v": 1.0}),
    "kda_bounded": ("KDA", {**DELTA, "num_v_heads": 4, "allow_neg_eigval": True, "lower_bound": -5.0}),
    "kda_no_conv": ("KDA", {**DELTA, "use_short_conv": False, "norm_eps": 1e-3}),
    "linear_attn_identity": ("LinearAttention", {**LINEAR, "feature_map": "identity", "norm_eps": 1e-3}),
}


def draw(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Weights near one for norms, small for vectors and mixing weights, of unit gain for matrices."""
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    if name.endswith("lora.2.bias"):
        return noise - 1
    if parameter.ndim == 1 or name.endswith(("x_bias", "lower_bounds", "bonus")):
        return 0.4 * noise
    return noise if "embeddings" in name else noise / math.sqrt(parameter[0].numel())


def flatten(states: Any) -> dict[str, Tensor]:
    """The cache as {"0.recurrent_state": ..., "0.conv_state.1": ...}; tuples get a position as last part."""
    flat = {}
    for index, layer in enumerate(states):
        for name, value in layer.items():
            parts = {name: value} if isinstance(value, Tensor) else {}
            if isinstance(value, tuple | list):
                parts = {f"{name}.{position}": part for position, part in enumerate(value)}
            flat |= {f"{index}.{part}": tensor for part, tensor in parts.items()}
    return flat


def naive_rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **_: Any) -> tuple[Tensor, None]:
    """fla's definition in torch in place of its chunked kernel, which here is 2e-3 from its recurrent one."""
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    q, k, v, a, b, w = (part.transpose(1, 2) for part in (r * math.sqrt(r.shape[-1]), k, v, a, b, w))
    return dplr_recurrence(q, k, v, a, b, w)[0].transpose(1, 2), None


def make(name: str) -> dict[str, Tensor]:
    """Tensors of one fixture. Raises AssertionError where fla's continued run differs from its full run."""
    import fla.models

    family, options = FIXTURES[name]
    config = getattr(fla.models, f"{family}Config")(**{**SHARED, **options})
    model = getattr(fla.models, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(draw(key, parameter, generator))
    ids = torch.randint(SHARED["vocab_size"], (ROWS, LENGTH), generator=generator)
    with torch.no_grad():
        full = model(ids, use_cache=True)
        first = model(ids[:, :SPLIT], use_cache=True)
        states = {key: part.clone() for key, part in flatten(first.past_key_values).items()}
        second = model(ids[:, SPLIT:], past_key_values=first.past_key_values, use_cache=True)
    continued = torch.cat([first.logits, second.logits], dim=1)
    print(f"{name}: continued from a cache differs by {(continued - full.logits).abs().max():.1e}")
    with patch("fla.layers.rwkv7.chunk_rwkv7", naive_rwkv7):
        logits = model(ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if getattr(config, "use_l2warp", False):
        loss = fla.modules.l2warp.l2_warp(loss, logits)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    print(f"{name}: loss {loss:.4f}, with gradients differs by {(logits - full.logits).abs().max():.1e}")
    groups = {
        "weight": model.state_dict(),
        "grad": dict(zip(named, gradients, strict=True)),
        "state": flatten(full.past_key_values),
        "state_at_split": states,
        "run": {"input_ids": ids, "logits": full.logits, "continued_logits": continued, "loss": loss},
    }
    tensors = {
        f"{group}/{key}": t.detach().clone().contiguous() for group, part in groups.items() for key, t in part.items()
    }
    notes = {
        "config": json.dumps(config.to_dict()),
        "split": str(SPLIT),
        **{
            package: importlib.metadata.version(package) for package in ("fla-core", "triton", "torch", "transformers")
        },
    }
    path = Path(__file__).parent / "upstream" / f"{config.model_type}.safetensors"
    write_group(path, name, tensors, notes)
    print(f"{name}: {path} has {path.stat().st_size / 1024:.0f} KiB")
    return tensors


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    from interpreter import stand_in_for_a_gpu

    stand_in_for_a_gpu()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture)
