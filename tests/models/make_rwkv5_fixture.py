"""Write tests/models/upstream/rwkv5.safetensors: tiny RWKV-5 models, run by the official code for Transformers.

Run by hand, in an environment of its own (the code is of 2024), no GPU needed:
pip install torch safetensors "transformers==4.38.2"
git clone https://github.com/BBuf/RWKV-World-HF-Tokenizer CLONE
python tests/models/make_rwkv5_fixture.py CLONE

That repository is where modeling_rwkv5.py of RWKV/rwkv-5-world-* comes from. Its slow path runs, unchanged but for two
stand-ins: flash-rwkv, a CUDA package it asks for, and, where gradients are taken, `torch.no_grad`, by which the slow
path cuts its states off the graph (its kernel does not). Names and layouts are those of `upstream_fixtures.py`.
"""

import contextlib
import importlib
import importlib.metadata
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from tensor_groups import write_group
from torch import Tensor

ROWS, LENGTH, SPLIT = 2, 37, 21
SHARED = {"vocab_size": 29, "hidden_size": 16, "attention_hidden_size": 16, "head_size": 8, "rescale_every": 1}
# name -> commit, folder, options, and fields that say what its code does: before March 2024 it did not divide, and
# num_attention_heads was the size of a head.
EARLY = {"num_hidden_layers": 2, "num_attention_heads": 8, "layer_norm_epsilon": 1e-3}
FIXTURES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "rwkv5": ("699270b345f2fae060a7aee1a31be4f6b2fecd36", "rwkv5_model", {"num_hidden_layers": 3}, {}),
    "rwkv5_no_divisor": (
        "c5ce9cea31f188c9dfb56270cf0515d9109edea6",
        "rwkv_world_v5_model_batch",
        EARLY,
        {"head_size_divisor": 1},
    ),
}


def draw(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Weights near one for norms, small for biases and bonuses, of unit gain for matrices; decays of all speeds."""
    noise = torch.randn(parameter.shape, generator=generator)
    if "time_decay" in name:
        return noise - 1
    if "time_mix" in name:
        return 0.5 + 0.4 * noise
    if "ln" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    if parameter.ndim == 1 or "time_faaaa" in name:
        return 0.4 * noise
    return noise if "embeddings" in name else noise / math.sqrt(parameter.shape[1])


def per_layer(state: list[Tensor]) -> dict[str, Tensor]:
    """The official state, whose last axis is the layer, under the names that fla's RWKV-6 gives the same parts."""
    parts = dict(zip(("conv_state", "recurrent_state", "ffn_state"), state, strict=True))
    return {f"{n}.{name}": part[..., n].clone() for name, part in parts.items() for n in range(part.shape[-1])}


def make(name: str, code: Any, config_code: Any, notes: dict[str, str]) -> None:
    """Write one fixture."""
    _, _, options, facts = FIXTURES[name]
    config = config_code.Rwkv5Config(**SHARED, **options)
    model = code.Rwkv5ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(draw(key, parameter, generator))
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
    with torch.no_grad():
        full = model(ids, use_cache=True)
        first = model(ids[:, :SPLIT], use_cache=True)
        states = per_layer(first.state)
        second = model(ids[:, SPLIT:], state=first.state, use_cache=True)
    continued = torch.cat([first.logits, second.logits], dim=1)
    print(f"{name}: continued from a state differs by {(continued - full.logits).abs().max():.1e}")
    named = dict(model.named_parameters())
    in_graph = SimpleNamespace(**vars(torch) | {"no_grad": contextlib.nullcontext})
    with patch.object(code, "torch", in_graph), torch.autograd.graph.allow_mutation_on_saved_tensors():
        output = model(ids, labels=ids, use_cache=True)
        gradients = torch.autograd.grad(output.loss, list(named.values()))
    print(f"{name}: loss {output.loss:.4f}, with gradients differs by {(output.logits - full.logits).abs().max():.1e}")
    groups = {
        "weight": model.state_dict(),
        "grad": dict(zip(named, gradients, strict=True)),
        "state": per_layer(full.state),
        "state_at_split": states,
        "run": {"input_ids": ids, "logits": full.logits, "continued_logits": continued, "loss": output.loss},
    }
    tensors = {f"{group}/{key}": t.detach().clone() for group, part in groups.items() for key, t in part.items()}
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
    notes = {"config": json.dumps(config.to_dict() | facts), "split": str(SPLIT), **notes, **versions}
    path = Path(__file__).parent / "upstream/rwkv5.safetensors"
    write_group(path, name, tensors, notes)
    print(f"{name}: {path} has {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules["flash_rwkv"] = Mock()
    found = Mock(parsed_version=0)
    sys.modules["pkg_resources"] = Mock(parse_version=lambda _: 0, get_distribution=lambda _: found)
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for fixture, (commit, source, _, _) in FIXTURES.items():
            Path(folder, fixture).mkdir()
            for file in ("configuration_rwkv5.py", "modeling_rwkv5.py"):
                text = subprocess.check_output(["git", "-C", sys.argv[1], "show", f"{commit}:{source}/{file}"])
                Path(folder, fixture, file).write_bytes(text)
            code, config_code = (
                importlib.import_module(f"{fixture}.{kind}_rwkv5") for kind in ("modeling", "configuration")
            )
            repository = "https://github.com/BBuf/RWKV-World-HF-Tokenizer"
            make(fixture, code, config_code, {"repository": repository, "commit": commit, "file": f"{source}/{file}"})
