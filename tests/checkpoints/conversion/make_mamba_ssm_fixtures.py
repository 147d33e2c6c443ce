"""Write mamba_ssm: tiny checkpoints that mamba-ssm's `save_pretrained` wrote, and what they compute.

Run by hand, in an environment of its own, no GPU needed:
pip install torch transformers safetensors einops triton
MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation "mamba-ssm==2.3.2.post1"
python tests/checkpoints/conversion/make_mamba_ssm_fixtures.py [name ...]

Kernels run in Triton's interpreter; the scan of Mamba-1, which is CUDA only, is mamba-ssm's own `selective_scan_ref`.
Weights are drawn here, as fresh models have zero biases and tiny weights, which would hide mistakes. Each folder holds
config.json and pytorch_model.bin as upstream wrote them; golden.safetensors has input ids, logits, final states.
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
FIXTURES: dict[str, dict[str, Any]] = {
    # As the official Mamba-1 and Mamba-2 checkpoints: vocabularies that are padded, tied heads.
    "mamba1": {"ssm_cfg": {"d_state": 8}, "vocab_size": 29},
    "mamba2": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8},
        "vocab_size": 33,
        "pad_vocab_size_multiple": 16,
    },
    "mamba1_untied": {
        "ssm_cfg": {"layer": "Mamba1", "d_state": 4, "d_conv": 3, "expand": 3, "dt_rank": 2, "bias": True},
        "tie_embeddings": False,
        "residual_in_fp32": False,
        "vocab_size": 24,
    },
    "mamba2_untied": {
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": 4,
            "headdim": 4,
            "ngroups": 2,
            "d_conv": 2,
            "bias": True,
            "dt_limit": [0.05, 0.7],
            "chunk_size": 16,
            "A_init_range": [1, 4],
        },
        "tie_embeddings": False,
        "fused_add_norm": False,
        "pad_vocab_size_multiple": 1,
        "vocab_size": 21,
    },
    "mamba1_bfloat16": {"ssm_cfg": {"d_state": 4}, "vocab_size": 17},  # A_log and D stay in float32
}


def make(name: str) -> None:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    from mamba_ssm.utils.generation import InferenceParams

    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    config = MambaConfig(d_model=16, n_layer=2, **FIXTURES[name])
    torch.manual_seed(len(name))
    model = MambaLMHeadModel(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_(1 + 0.2 * noise)
            elif key.endswith(("A_log", "D", "dt_bias", "dt_proj.bias")):
                parameter.add_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise if "embedding" in key else noise / parameter[0].numel() ** 0.5)
    folder = Path(__file__).parent / "mamba_ssm" / name
    model.save_pretrained(folder)
    golden = {}
    if dtype == torch.float32:
        ids = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
        carried = InferenceParams(max_seqlen=LENGTH, max_batch_size=ROWS)
        with torch.no_grad():
            golden = {"input_ids": ids, "logits": model(ids, inference_params=carried).logits}
        for layer, (conv, recurrent) in carried.key_value_memory_dict.items():
            golden |= {f"{layer}.conv": conv, f"{layer}.recurrent": recurrent}
        write_group(folder.parent / "golden.safetensors", name, golden)
        print(f"{name}: logits up to {golden['logits'].abs().max():.2f}")
    print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()) / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))
    from interpreter import stand_in_for_a_gpu

    stand_in_for_a_gpu()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import mamba_ssm.modules.mamba_simple as mamba_simple
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref

    mamba_simple.selective_scan_fn = selective_scan_ref
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture)
