"""Write tests/models/upstream/initial_weights.json: how the authors' packages draw the weights of new models.

Run by hand, in an environment of its own, no GPU needed:
pip install torch transformers einops triton "flash-linear-attention==0.6.0"
MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation "mamba-ssm==2.3.2.post1"
python tests/models/make_initial_weights.py [name ...]

For each parameter, all layers together: values at equal steps through all that were drawn, and the share of values up
to each of them. `test_initial_weights.py` compares our own new models of the same config with these distributions.
"""

import json
import os
import re
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

MAMBA = {"d_model": 256, "n_layer": 4, "vocab_size": 1000, "tie_embeddings": False}
FLA = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1000}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": MAMBA | {"ssm_cfg": {"layer": "Mamba1"}},
    "mamba2": MAMBA | {"ssm_cfg": {"layer": "Mamba2", "headdim": 4}},
    "gla": FLA | {"num_heads": 4},
    "rwkv6": FLA | {"num_heads": 4},
    "hgrn2": FLA | {"num_heads": 2},
    "delta_net": FLA | {"num_heads": 4},
    "gated_deltanet": FLA | {"num_heads": 32, "head_dim": 8},
    "kda": FLA | {"num_heads": 32, "head_dim": 8},
    "rwkv7": FLA | {"head_dim": 64},
}
CLASSES = {"delta_net": "DeltaNet", "gated_deltanet": "GatedDeltaNet"}
STEPS = 21


def new_model(name: str) -> nn.Module:
    if name.startswith("mamba"):
        sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")  # not built, only imported
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        return MambaLMHeadModel(MambaConfig(**CONFIGS[name]))  # type: ignore[no-any-return]
    import fla.models

    family = CLASSES.get(name, name.upper())
    config = getattr(fla.models, f"{family}Config")(**CONFIGS[name])
    return getattr(fla.models, f"{family}ForCausalLM")(config)  # type: ignore[no-any-return]


def distributions(model: nn.Module) -> dict[str, list[tuple[float, float]]]:
    """Of each parameter: values, and the share of all values up to each."""
    drawn: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        drawn[re.sub(r"layers\.\d+", "layers.*", name)].append(parameter.detach().flatten().double())
    result = {}
    for name, parts in drawn.items():
        values = torch.cat(parts).sort().values
        at = values[torch.linspace(0, len(values) - 1, STEPS).round().long()]
        shares = torch.searchsorted(values, at, right=True) / len(values)
        result[name] = sorted({(float(f"{a:.5g}"), round(float(s), 5)) for a, s in zip(at, shares, strict=True)})
    return result


def main() -> None:
    file = Path(__file__).parent / "upstream/initial_weights.json"
    written = json.loads(file.read_text(encoding="utf-8")) if sys.argv[1:] else {}
    for name in sys.argv[1:] or CONFIGS:
        torch.manual_seed(0)
        written[name] = {"config": CONFIGS[name], "parameters": distributions(new_model(name))}
    lines = json.dumps(written, indent=1)
    lines = re.sub(r"\[\s+(\S+),\s+(\S+)\s+\](,)?\s*", r"[\1, \2]\3 ", lines)  # a parameter in a line
    file.write_text(re.sub(r"\[\s+\[", "[[", lines).replace("] ]", "]]") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
