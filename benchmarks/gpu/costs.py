"""What a layer costs on a GPU in one training step, counted on a CPU: kernel launches, and bytes kept for backward.

    python benchmarks/gpu/costs.py [NAME ...] [--json FILE]     in the environment of `make test-kernels`

Ours reads a state and returns one, and both have gradients; what other packages have has no states. "mixer" is a call
of one; "block" is what one layer more adds to a whole model, its norm and residual included. bfloat16, one row.

Launches: each kernel of Triton, each operator of torch but views and fresh memory, one for causal-conv1d or
selective_scan_cuda in each direction (launches.py). Some operators are more than one kernel on a GPU. Bytes: storages
that autograd keeps, once each, without parameters, per token in units of the hidden state in bfloat16 (a difference of
two lengths), and what remains per row, such as states.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:] = [str(Path(__file__).resolve().parents[2]), *sys.path[1:]]  # kernels.py here is not the package `kernels`

from benchmarks.gpu import launches  # noqa: E402  isort: skip

launches.stand_in_for_a_gpu()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, FalconH1Config  # noqa: E402
from transformers.utils import logging  # noqa: E402

from hf_recurrent_lengthgen.hybrids import stateful  # noqa: E402
from hf_recurrent_lengthgen.models import FAMILIES  # noqa: E402
from hf_recurrent_lengthgen.models.state_value import LayerState, map_state  # noqa: E402

LENGTHS = 256, 512
Forward = Callable[[], list[Tensor]]
"""Gives what has gradients."""


SPECIAL = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SIZES: dict[str, dict[str, Any]] = {  # Mamba of 130 million parameters, GLA of 340, Falcon-H1 of 500
    "mamba": {"hidden_size": 768, "state_size": 16},
    "mamba2": {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1},
    "gla": {"hidden_size": 1024, "num_heads": 4},
    "falcon_h1": {
        **{"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
        **{"mamba_chunk_size": 128, "mamba_rms_norm": False, "head_dim": 64},
    },
}


class Cost(NamedTuple):
    """Launches by name in each direction; bytes kept for each token and for the row."""

    forward: dict[str, int]
    backward: dict[str, int]
    bytes_per_token: float
    bytes_per_row: float


def cost_of(make: Callable[[int], Forward], module: nn.Module) -> Cost:
    """Forward and backward of `make(number of tokens)`, which calls the module."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = []
    for length in LENGTHS:
        storages: dict[int, Any] = {}

        def keep(tensor: Tensor, storages: dict[int, Any] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        run = make(length)
        with launches.counted() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = run()
        kept.append(sum(storage.nbytes() for address, storage in storages.items() if address not in own))
        gradients = [torch.zeros_like(t) for t in outputs]
        with launches.counted() as backward:
            torch.autograd.backward(outputs, gradients)
        module.zero_grad(set_to_none=True)
    per_token = (kept[1] - kept[0]) / (LENGTHS[1] - LENGTHS[0])
    return Cost(dict(forward.names), dict(backward.names), per_token, kept[0] - per_token * LENGTHS[0])


def difference(more: Cost, less: Cost) -> Cost:
    """What one layer more costs."""
    names = [{name: a.get(name, 0) - b.get(name, 0) for name in a} for a, b in zip(more[:2], less[:2], strict=True)]
    return Cost(*names, *(a - b for a, b in zip(more[2:], less[2:], strict=True)))


def model_of(kind: str, layers: int) -> nn.Module:
    """A model of ours, or of Transformers with states."""
    fields = SPECIAL | SIZES[kind] | {"num_hidden_layers": layers}
    if kind == "falcon_h1":
        return stateful(stock_hybrid(layers))
    model_class = FAMILIES[f"stateful_{kind}"]
    return model_class(model_class.config_class(**fields)).bfloat16().train()


def stock_hybrid(layers: int) -> nn.Module:
    config = FalconH1Config(**SPECIAL, **SIZES["falcon_h1"], num_hidden_layers=layers)
    return AutoModelForCausalLM.from_config(config).bfloat16().train()


def upstream_of(kind: str, layers: int) -> nn.Module:
    """The model of mamba-ssm, fla or Transformers."""
    if kind == "falcon_h1":
        return stock_hybrid(layers)
    if kind == "gla":
        from fla.models import GLAConfig, GLAForCausalLM

        return GLAForCausalLM(GLAConfig(**SPECIAL, **SIZES[kind], num_hidden_layers=layers)).bfloat16().train()
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    layer = {"mamba": {"layer": "Mamba1"}, "mamba2": {"layer": "Mamba2", "d_state": 128}}[kind]
    config = MambaConfig(d_model=SIZES[kind]["hidden_size"], n_layer=layers, vocab_size=256, ssm_cfg=layer)
    return MambaLMHeadModel(config, dtype=torch.bfloat16)


def cost_of_model(model: Any, states: bool) -> Cost:
    """Of a whole model, with a state before and after where it takes one."""

    def make(length: int) -> Forward:
        ids = torch.arange(length)[None] % 251
        if not states:
            model.config.use_cache = False  # with one, Transformers takes no fused path
            return lambda: [model(ids).logits]
        before = map_state(Tensor.requires_grad_, model.zero_state(1))

        def run() -> list[Tensor]:
            out = model(ids, initial_state=before, output_final_state=True)
            return [out.logits, *(t for part in out.final_state for t in part if t.requires_grad)]

        return run

    return cost_of(make, model)


def cost_of_mixer(kind: str, mixer: Any, states: bool) -> Cost:
    """Of a mixer alone; wrapped ones of Transformers have `read`."""

    def make(length: int) -> Forward:
        x = torch.randn(1, length, SIZES[kind]["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        if not states:
            return lambda: [y if isinstance(y := mixer(x), Tensor) else y[0]]
        before = LayerState(*(torch.zeros(1, *shape, requires_grad=True) for shape in mixer.state_shape))

        def run() -> list[Tensor]:
            y, after = (mixer.read if hasattr(mixer, "read") else mixer)(x, before, None)
            return [y, *(t for t in after if t.requires_grad)]

        return run

    return cost_of(make, mixer)


def first_mixer(model: Any) -> Any:
    layers = model.model.layers if hasattr(model, "model") else model.backbone.layers
    return next(getattr(layers[0], name) for name in ("mixer", "mamba", "attn") if hasattr(layers[0], name))


ROWS = {"mamba": ("Mamba-1", "mamba-ssm"), "mamba2": ("Mamba-2", "mamba-ssm")} | {
    "falcon_h1": ("Falcon-H1", "Transformers"),
    "gla": ("GLA", "fla"),
}


def measured(kind: str) -> dict[str, Cost]:
    """All rows of a kind."""
    found = {}
    for who, make, states in (("ours", model_of, True), (ROWS[kind][1], upstream_of, False)):
        found[f"{ROWS[kind][0]} mixer, {who}"] = cost_of_mixer(kind, first_mixer(make(kind, 1)), states)
        more, less = (cost_of_model(make(kind, layers), states) for layers in (3, 2))
        found[f"{ROWS[kind][0]} block, {who}"] = difference(more, less)
    return dict(sorted(found.items(), key=lambda item: "block" in item[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--json", type=Path, help="file for the launches of each by name")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_flush_denormal(True)  # what memory holds may be slow
    everything = {}
    print("| | launches forward | backward | of both in Triton | kept per token (hidden states) | per row (MiB) |")
    print("|---|---|---|---|---|---|")
    for kind in options.names or ROWS:
        for name, cost in measured(kind).items():
            everything[name] = cost._asdict()
            ours = sum(count for part in cost[:2] for kernel, count in part.items() if kernel.startswith("triton"))
            sizes = cost.bytes_per_token / (2 * SIZES[kind]["hidden_size"]), cost.bytes_per_row / 2**20
            launched = sum(cost.forward.values()), sum(cost.backward.values()), ours
            print(f"| {name} | {' | '.join(map(str, launched))} | {sizes[0]:.1f} | {sizes[1]:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
