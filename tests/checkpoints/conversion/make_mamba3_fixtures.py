"""Write mamba_ssm/mamba3*: tiny Mamba-3 checkpoints of mamba-ssm, and what its own code computes.

Run by hand, in an environment of its own, no GPU needed:
pip install torch transformers safetensors einops triton
git clone https://github.com/state-spaces/mamba CLONE && git -C CLONE checkout e9594ce
python tests/checkpoints/conversion/make_mamba3_fixtures.py CLONE [name ...]

The models, their modules and `save_pretrained` are mamba-ssm's. Its kernels run on a GPU only, so the scan is the
reference of its tests, `mamba3_siso_step_ref`, and norms are its references, `rms_norm_ref`: all plain torch. Weights
are drawn as in `make_mamba_ssm_fixtures.py`. Each folder holds config.json and pytorch_model.bin as upstream wrote
them; golden.safetensors has input ids, logits, and the cache after the last token, in the frame of upstream.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import torch
from tensor_groups import write_group

ROWS, LENGTH = 2, 19
FIXTURES: dict[str, dict[str, Any]] = {
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", "d_state": 8, "headdim": 8}, "vocab_size": 29},
    "mamba3_untied": {
        "ssm_cfg": {
            "layer": "Mamba3",
            "d_state": 6,
            "headdim": 4,
            "ngroups": 2,
            "rope_fraction": 1.0,
            "is_outproj_norm": True,
            "A_floor": 0.3,
            "chunk_size": 16,
        },
        "d_intermediate": 100,
        "tie_embeddings": False,
        "residual_in_fp32": False,
        "vocab_size": 24,
    },
}


def use_references(clone: Path) -> None:
    """Put mamba-ssm's torch references in place of its kernels."""
    import mamba_ssm.modules.mamba3 as mamba3
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated

    spec = importlib.util.spec_from_file_location("references", clone / "tests/ops/triton/test_mamba3_siso.py")
    assert spec is not None
    assert spec.loader is not None
    references = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(references)

    def scan(*, return_final_states: bool, chunk_size: int, cu_seqlens: None, **inputs: Any) -> Any:
        out, states = references.mamba3_siso_step_ref(**inputs)
        return (out, *states) if return_final_states else out

    def norm(*inputs: Any, residual_in_fp32: bool, **options: Any) -> Any:  # no residual is given
        return layer_norm.rms_norm_ref(*inputs, **options)

    mamba3.mamba3_siso_combined, layer_norm.rms_norm_fn = scan, norm
    layernorm_gated.rmsnorm_fn = layernorm_gated.rms_norm_ref


def make(name: str) -> None:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    from mamba_ssm.utils.generation import InferenceParams

    config = MambaConfig(d_model=16, n_layer=2, fused_add_norm=False, **FIXTURES[name])
    torch.manual_seed(len(name))
    model = MambaLMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_(1 + 0.2 * noise)
            elif key.endswith(("D", "dt_bias")):
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise if "embedding" in key else noise / parameter[0].numel() ** 0.5)
    folder = Path(__file__).parent / "mamba_ssm" / name
    model.save_pretrained(folder)
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
    carried = InferenceParams(max_seqlen=LENGTH, max_batch_size=ROWS)
    with torch.no_grad():
        golden = {"input_ids": ids, "logits": model(ids, inference_params=carried).logits}
    for layer, states in carried.key_value_memory_dict.items():
        golden |= {f"{layer}.{part}": state for part, state in zip(("angle", "ssm", "k", "v"), states, strict=True)}
    write_group(folder.parent / "golden.safetensors", name, golden)
    print(f"{name}: logits up to {golden['logits'].abs().max():.2f}, ", end="")
    print(f"{sum(path.stat().st_size for path in folder.iterdir()) / 1024:.0f} KiB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    use_references(Path(sys.argv[1]))
    for fixture in sys.argv[2:] or FIXTURES:
        make(fixture)
