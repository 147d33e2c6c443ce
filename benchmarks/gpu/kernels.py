"""Kernels against the torch path: errors of each family against float64.

A part builds two layers of a family, reads random embeddings from a random state, and takes all gradients of a random
functional of logits and final states. Truth is the torch path in float64 on the same (rounded) numbers. An error is
relative to the largest entry of a tensor, and the largest over the tensors of a kind is kept: for the kernels and, to
compare, for the torch path in the same dtype.
"""

import math
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.stage import DEVICE, Part, Stage
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.state_value import map_state
from tests.models.families import random_state
from tests.models.law import model_step, run_in_chunks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = {"logits": "outputs", "final": "states", "gradient": "gradients"}
SECONDS = 30.0  # kernels are compiled in the first part of a family
Errors = dict[str, float]


def configs(width: int, head: int, state: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Model type and fields of each family, for layers of a width with heads of a size."""
    heads = {"num_heads": width // head}
    return {
        "mamba2": ("mamba2", {"num_heads": 2 * width // head, "head_dim": head, "state_size": state, "n_groups": 1}),
        "mamba3": ("mamba3", {"head_dim": head, "state_size": state}),
        "mamba": ("mamba", {"state_size": 16}),
        "falcon_mamba": ("mamba", {"state_size": 16, "mixer_rms_eps": 1e-6}),
        "gla": ("gla", heads),
        "hgrn2": ("hgrn2", {"expand_ratio": head}),
        "linear_attention": ("linear_attention", heads),
        "rwkv6": ("rwkv6", heads),
        "rwkv5": ("rwkv5", {"head_size": head}),
        "delta_net": ("delta_net", heads),
        "gated_deltanet": ("gated_deltanet", {**heads, "head_dim": head}),
        "kda": ("kda", {**heads, "head_dim": head}),
        "rwkv7": ("rwkv7", {"head_dim": head}),
    }


def compared(kind: str, fields: dict[str, Any], dtype: torch.dtype, rows: int, length: int) -> dict[str, Any]:
    """Errors of the kernels, or why they are missing, and of the torch path."""
    torch.manual_seed(0)
    made = FAMILIES[f"stateful_{kind}"]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = made.config_class(vocab_size=256, num_hidden_layers=2, scan_backend="torch", **special, **fields)
    model = made(config).to(dtype).eval()
    embeds = torch.randn(rows, length, config.hidden_size).to(dtype)
    state = random_state(model, rows)
    expected = passed(deepcopy(model).double(), embeds.double(), map_state(Tensor.double, state))
    result: dict[str, Any] = {"torch": errors(passed(model, embeds, state), expected)}
    model.config.scan_backend = "kernel"
    try:
        result["kernel"] = errors(passed(model, embeds, state), expected)
    except ValueError as error:  # how the package refuses kernels that are not there
        result["kernel"] = {"missing": str(error)}
    return result


def passed(model: Any, embeds: Tensor, state: Any) -> dict[str, Tensor]:
    """Outputs, final state and all gradients."""
    model.to(DEVICE)
    parameters = {name: p for name, p in model.named_parameters() if "embed" not in name}
    state = map_state(lambda part: part.to(DEVICE), state)
    return run_in_chunks(model_step(model), parameters, embeds.to(DEVICE), state)


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Errors:
    """The largest error by kind; infinite if there is a NaN."""
    largest: Errors = dict.fromkeys(KINDS.values(), 0.0)
    for name, value in expected.items():
        if value.numel():
            kind = KINDS[name.split()[0]]
            error = float((actual[name].double() - value).abs().max() / value.abs().max().clamp(min=1e-30))
            largest[kind] = max(largest[kind], math.inf if math.isnan(error) else error)
    return {kind: float(f"{error:.3g}") for kind, error in largest.items()}


def run(stage: Stage) -> None:
    """All parts: errors by family and dtype."""
    width, head, state = (32, 16, 16) if stage.tiny else (512, 64, 128)
    rows, length = (1, 40) if stage.tiny else (2, 1000)
    parts: dict[str, Part] = {
        f"{family}, {name}": partial(compared, kind, {"hidden_size": width, **fields}, dtype, rows, length)
        for family, (kind, fields) in configs(width, head, state).items()
        for name, dtype in DTYPES.items()
    }
    stage.run(parts, 0 if stage.tiny else SECONDS)


def row(parts: dict[str, Any]) -> str:
    """The largest errors of kernels and torch in each dtype."""
    lines = []
    for dtype in DTYPES:
        for path in ("kernel", "torch"):
            of_path = {name: part.get(path, {}) for name, part in parts.items() if name.endswith(f", {dtype}")}
            by_family = {name.partition(",")[0]: part for name, part in of_path.items() if "outputs" in part}
            if by_family:
                worst = {kind: max(by_family, key=lambda name: by_family[name][kind]) for kind in KINDS.values()}
                largest = ", ".join(f"{kind} {by_family[name][kind]:.1e} ({name})" for kind, name in worst.items())
                lines.append(f"{path} {dtype}, largest errors of {len(by_family)} families: {largest}")
    return "; ".join(lines) or "nothing measured yet"
