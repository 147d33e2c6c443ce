"""Write fla: tiny checkpoints that fla's `save_pretrained` wrote, and what its models compute.

Run by hand, in an environment of its own (fla replaces classes that Transformers registers), no GPU needed:
pip install torch transformers safetensors einops triton "flash-linear-attention==0.6.0"
python tests/checkpoints/conversion/make_fla_fixtures.py [name ...]

Kernels run in Triton's interpreter, Mamba and Mamba-2 on fla's paths without kernels. Weights are drawn here, for
fresh models have zero biases and tiny weights, which would hide mistakes. Each folder holds config.json and
model.safetensors as fla wrote them; golden.safetensors has input ids, logits, and the cache after the last token.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import torch
from tensor_groups import write_group

ROWS, LENGTH = 2, 19
SHARED = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_heads": 2, "intermediate_size": 12}
DELTA = {**HEADS, "head_dim": 4, "expand_v": 2.0, "allow_neg_eigval": True}
MAMBA2 = {"head_dim": 8, "state_size": 4, "chunk_size": 8}
RWKV7 = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 2, "v_low_rank_dim": 4}
# Fields that only choose an implementation differ from fla's defaults in some, so that a loss of them is seen.
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", {**HEADS, "fuse_swiglu": False, "max_position_embeddings": 64, "use_short_conv": True}),
    "rwkv6": ("RWKV6", {**HEADS, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5, "intermediate_size": None}),
    "rwkv7": ("RWKV7", {**RWKV7, "head_dim": 8, "intermediate_size": 12, "fuse_norm": False}),
    "hgrn2": ("HGRN2", {"expand_ratio": 8, "intermediate_size": 12, "fuse_linear_cross_entropy": False}),
    "linear_attn": ("LinearAttention", {**HEADS, "attn_mode": "chunk", "tie_word_embeddings": True}),
    "delta_net": ("DeltaNet", {**HEADS, "use_gate": True, "qk_activation": "relu", "fuse_norm": False}),
    "gated_deltanet": ("GatedDeltaNet", {**DELTA, "num_v_heads": 4, "output_gate_activation": "sigmoid"}),
    "kda": ("KDA", {**DELTA, "lower_bound": -5.0, "safe_gate": True, "tie_word_embeddings": True}),
    "mamba": ("Mamba", {"state_size": 4, "norm_eps": 1e-3, "use_bias": True, "residual_in_fp32": True, "dt_rank": 3}),
    "mamba_tied": ("Mamba", {"state_size": 4, "expand": 3, "conv_kernel": 3, "tie_word_embeddings": True}),
    # As many groups as heads: with fewer, fla's path without kernels gives groups to other heads than its kernels do.
    "mamba2": ("Mamba2", {**MAMBA2, "norm_eps": 1e-3, "n_groups": 4}),
    "mamba2_limited": ("Mamba2", {**MAMBA2, "dt_limit": (0.05, 0.7), "conv_init": 0.3, "tie_word_embeddings": True}),
}


def make(name: str) -> None:
    import fla.models
    from make_upstream_fixtures import draw, flatten

    family, options = FIXTURES[name]
    config = getattr(fla.models, f"{family}Config")(**SHARED, **options)
    model = getattr(fla.models, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("A_log", ".D", "dt_bias", "dt_proj.bias")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(draw(key, parameter, generator))
    folder = Path(__file__).parent / "fla" / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
    with torch.no_grad():
        output = model(ids, use_cache=True)
    golden = {"input_ids": ids, "logits": output.logits, **flatten(output.past_key_values)}
    write_group(folder.parent / "golden.safetensors", name, golden)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1024
    print(f"{name}: logits up to {output.logits.abs().max():.2f}, {size:.0f} KiB, cache {sorted(golden)[:4]}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))
    from interpreter import stand_in_for_a_gpu

    stand_in_for_a_gpu()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture)
