"""The kernels of mamba-ssm and fla against the definitions without a GPU: Triton's interpreter runs them on a CPU.

Needs triton, einops and, each for its part, flash-linear-attention and mamba-ssm, whose CUDA extension is not needed:
MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm

The interpreter is chosen when triton is imported, and fla replaces classes that Transformers registers, so each part
runs in a process of its own: this file as a script.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

NEEDS = {
    "ssd": "mamba_ssm",
    "mamba2_model": "mamba_ssm",
    "selective": "mamba_ssm",
    "trapezoid": "fla",
    "trapezoid_per_channel": "fla",
    "gla": "fla",
    "gla_model": "fla",
    "rwkv6": "fla",
    "rwkv6_model": "fla",
    "gated_deltanet": "fla",
    "gated_deltanet_per_channel": "fla",
    "kda": "fla",
    "dplr": "fla",
    "gated_deltanet_model": "fla",
    "rwkv7_model": "fla",
}
B, H, P, N, G = 2, 4, 8, 8, 2
# as wide and as high as to fill no block of a kernel, and different: a state taken for its transpose shows
FLA_H, FLA_P, FLA_N = 2, 20, 12


@pytest.mark.slow
@pytest.mark.parametrize("part", list(NEEDS))
def test_the_interpreted_kernel_is_the_definition(part: str) -> None:
    missing = [name for name in ("triton", "einops", NEEDS[part]) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {missing}, which cannot be imported here")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, part]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert script.returncode == 0, script.stdout + script.stderr


def results(scan: Callable[..., tuple[Tensor, Tensor]], leaves: dict[str, Tensor], exact: bool) -> list[Tensor]:
    """Outputs, final state and all gradients of random leaves, in float64 if `exact`."""
    leaves = {name: (leaf.double() if exact else leaf).requires_grad_() for name, leaf in leaves.items()}
    generator = torch.Generator().manual_seed(1)
    y, state = scan(**leaves)
    weights = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in (y, state)]
    objective = (y * weights[0]).sum() + (state * weights[1]).sum()
    return [y.detach(), state.detach(), *torch.autograd.grad(objective, list(leaves.values()))]


def check(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    truth: Callable[..., tuple[Tensor, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    tolerance: float,
    make: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [make({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})]
    leaves += [{name: leaf.clone() for name, leaf in leaves[0].items()}]
    pairs = zip(results(kernel, leaves[0], False), results(truth, leaves[1], True), strict=True)
    errors = [float((k - t).abs().max() / t.abs().max().clamp_min(1e-30)) for k, t in pairs]
    print(next(iter(shapes.values())), " ".join(f"{error:.0e}" for error in errors), flush=True)
    assert all(error <= tolerance for error in errors), errors


def ends_in_padding(padding: int, t: Tensor) -> Tensor:
    """Zeros for the last tokens, with the gradients of zeros."""
    return torch.cat([t[:, : t.shape[1] - padding], 0 * t[:, t.shape[1] - padding :]], dim=1)


def compare_ssd() -> None:
    """x, B and C are slices of one projection, as in the layer."""
    from hf_recurrent_lengthgen.models import scan_ssd as module

    def compare(length: int, tolerance: float, dtype: torch.dtype = torch.float32, padding: int = 0) -> None:
        def make(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            A = -torch.arange(1.0, H + 1)
            return leaves | {"xBC": leaves["xBC"].to(dtype), "dt": leaves["dt"].abs() / 2, "A": A}

        def call(scan: Any, **options: Any) -> Any:
            def scan_slices(xBC: Tensor, dt: Tensor, D: Tensor, state: Tensor, A: Tensor) -> Any:
                x, B_, C = xBC.split([H * P, G * N, G * N], -1)
                x, B_, C = x.unflatten(-1, (H, P)), B_.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
                return scan(x, ends_in_padding(padding, dt), A, B_, C, D, state, **options)

            return scan_slices

        shapes = {"xBC": (B, length, H * P + 2 * G * N), "dt": (B, length, H), "D": (H,), "state": (B, H, P, N)}
        kernel = call(module.scan_ssd, chunk_size=16, backend="kernel")
        check(kernel, call(definitions.scan_ssd_reference), shapes, tolerance, make)

    compare(1, 2e-6)
    compare(37, 4e-6, padding=6)
    compare(37, 5e-2, torch.bfloat16)
    module._KERNEL_MAX_TOKENS, module._KERNEL_MAX_CHUNKS = 20, 2  # two pieces in time, one row at a time
    compare(37, 4e-6, padding=6)


def compare_selective() -> None:
    """mamba-ssm's own reference, as truth from a zero state, and with virtual tokens in the place of its kernel."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref

    from hf_recurrent_lengthgen.models import scan_selective as module

    def upstream(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        y, state = selective_scan_ref(*(t.float() for t in (x.mT, dt.mT, A, B.mT, C.mT, D)), return_last_state=True)
        return y.mT, state

    def from_zero(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        return module.scan_selective(x, dt, A, B, C, D, x.new_zeros(len(x), *A.shape), chunk_size=8)

    def with_kernel(**leaves: Tensor) -> tuple[Tensor, Tensor]:
        return module.scan_selective(**leaves, backend="kernel")

    def make(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return leaves | {"dt": F.softplus(leaves["dt"]), "A": -leaves["A"].exp()}

    for length in (1, 37):
        inner = (B, length, P * H)
        shapes = {"x": inner, "dt": inner, "A": (P * H, N), "B": (B, length, N), "C": (B, length, N), "D": (P * H,)}
        check(from_zero, upstream, shapes, 2e-6, make)
        module.selective_scan_fn = selective_scan_ref
        with_state = {**shapes, "initial_state": (B, P * H, N)}
        check(with_kernel, definitions.scan_selective_reference, with_state, 4e-6, make)


def compare_gated(scan: Any, reference: Any, names: str, **more: tuple[int, ...]) -> None:
    """`names` are the queries, keys and log decays: without keys and decay, padding leaves the state as it is."""
    _, key, decay = names

    def compare(length: int, tolerance: float, padding: int = 0, scale: float = 1.0) -> None:
        def make(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            leaves |= {decay: scale * F.logsigmoid(leaves[decay])}
            return leaves | {name: ends_in_padding(padding, leaves[name]) for name in (key, decay)}

        def with_kernel(**leaves: Tensor) -> tuple[Tensor, Tensor]:
            return scan(**leaves, backend="kernel")

        heads = (B, length, FLA_H)
        shapes = {name: (*heads, FLA_N) for name in names} | {"v": (*heads, FLA_P)} | more
        check(with_kernel, reference, shapes | {"initial_state": (B, FLA_H, FLA_P, FLA_N)}, tolerance, make)

    compare(1, 2e-6)
    compare(70, 1e-5)
    compare(70, 1e-5, padding=20, scale=1 / 16)
    compare(37, 5e-5, scale=8.0)  # gates add up to hundreds: fla takes differences of their sums
    from hf_recurrent_lengthgen.models import scan_fla_kernels as module

    module._KERNEL_MAX_TOKENS, module._KERNEL_MAX_HEADS = 64, FLA_H  # two pieces in time, one row at a time
    compare(70, 1e-5, padding=3)


def compare_gla() -> None:
    from hf_recurrent_lengthgen.models import scan_gla as module

    compare_gated(module.scan_gla, definitions.scan_gla_reference, "qkg")


def compare_trapezoid() -> None:
    """Without steps and decays, padding leaves the state as it is."""
    from hf_recurrent_lengthgen.models import scan_trapezoid as module

    def compare(length: int, padding: int = 0) -> None:
        def make(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            dt, g = F.softplus(leaves["dt"]), F.logsigmoid(leaves["g"])
            steps = {"dt": ends_in_padding(padding, dt), "g": ends_in_padding(padding, g)}
            return leaves | steps | {"share": leaves["share"].sigmoid()}

        def with_kernel(**leaves: Tensor) -> tuple[Tensor, Tensor]:
            return module.scan_trapezoid(**leaves, backend="kernel")

        shapes = {name: (B, length, FLA_H) for name in ("dt", "g", "share")} | {"w": (B, length, FLA_N // 4)}
        shapes |= {"x": (B, 1 + length, FLA_H, FLA_P), "B": (B, 1 + length, FLA_H, FLA_N)}
        shapes |= {"C": (B, length, FLA_H, FLA_N), "D": (FLA_H,), "initial_state": (B, FLA_H, FLA_P, FLA_N)}
        check(with_kernel, definitions.scan_trapezoid_reference, shapes, 1e-5, make)

    compare(1)
    compare(70, padding=5)


def refuse_gates_of_heads() -> None:
    """As on a Hopper GPU with Triton 3.4 to 3.7.0."""
    from hf_recurrent_lengthgen.models import scan_delta, scan_trapezoid

    scan_delta.refuses_gates_of_heads = scan_trapezoid.refuses_gates_of_heads = lambda _: True
    scan_delta.chunk_gated_delta_rule = scan_trapezoid.chunk_simple_gla = None


def compare_trapezoid_per_channel() -> None:
    refuse_gates_of_heads()
    compare_trapezoid()


def compare_rwkv6() -> None:
    from hf_recurrent_lengthgen.models import scan_rwkv6 as module

    compare_gated(module.scan_rwkv6, definitions.scan_rwkv6_reference, "rkw", u=(FLA_H, FLA_N))


def compare_delta(channels: int) -> None:
    """Keys of norm 1, beta up to 2: without beta and decay, padding leaves the state as it is."""
    from hf_recurrent_lengthgen.models import scan_delta as module
    from hf_recurrent_lengthgen.models import scan_fla_kernels as fla_kernels

    def compare(length: int, tolerance: float, padding: int = 0, scale: float = 1.0) -> None:
        def make(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            leaves |= {"g": ends_in_padding(padding, scale * F.logsigmoid(leaves["g"]))}
            leaves |= {"beta": ends_in_padding(padding, 2 * leaves["beta"].sigmoid())}
            return leaves | {name: F.normalize(leaves[name], dim=-1) for name in ("q", "k")}

        def with_kernel(**leaves: Tensor) -> tuple[Tensor, Tensor]:
            return module.scan_delta(**leaves, backend="kernel")

        heads = (B, length, FLA_H)
        shapes = {"q": (*heads, FLA_N), "k": (*heads, FLA_N), "v": (*heads, FLA_P), "g": (*heads, channels)}
        shapes |= {"beta": heads, "initial_state": (B, FLA_H, FLA_P, FLA_N)}
        check(with_kernel, definitions.scan_delta_reference, shapes, tolerance, make)

    compare(1, 2e-6)
    compare(70, 1e-5)
    compare(70, 1e-5, padding=20, scale=1 / 16)
    fla_kernels._KERNEL_MAX_TOKENS, fla_kernels._KERNEL_MAX_HEADS = 64, FLA_H  # two pieces, one row at a time
    compare(70, 1e-5, padding=3)


def compare_gated_deltanet() -> None:
    compare_delta(1)


def compare_gated_deltanet_per_channel() -> None:
    refuse_gates_of_heads()
    compare_delta(1)


def compare_kda() -> None:
    compare_delta(FLA_N)


def replace_gather() -> None:
    """The interpreter replaces functions of tl, not names imported from it."""
    import triton.language as tl
    from fla.ops.generalized_delta_rule.dplr import chunk_A_bwd, chunk_A_fwd

    for kernels in (chunk_A_fwd, chunk_A_bwd):
        kernels.gather = lambda *arguments, **options: tl.gather(*arguments, **options)


def compare_dplr() -> None:
    from hf_recurrent_lengthgen.models import scan_delta as module

    replace_gather()

    def make(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        kappa = F.normalize(leaves["a"], dim=-1)
        return leaves | {"a": -kappa, "b": kappa * leaves["b"].sigmoid(), "g": -0.6 * leaves["g"].sigmoid()}

    def with_kernel(**leaves: Tensor) -> tuple[Tensor, Tensor]:
        return module.scan_dplr(**leaves, backend="kernel")

    for length in (1, 70):
        shapes = {name: (B, length, FLA_H, FLA_N) for name in "qkgab"} | {"v": (B, length, FLA_H, FLA_P)}
        shapes |= {"initial_state": (B, FLA_H, FLA_P, FLA_N)}
        check(with_kernel, definitions.scan_dplr_reference, shapes, 2e-5, make)


def compare_model(family: str, **fields: Any) -> None:
    """The layer with the scan kernel: outputs, final states, gradients, and a split with the state carried.

    Args:
        family: As in the names of the model's classes.
        fields: Of the configuration.
    """
    from hf_recurrent_lengthgen import models
    from hf_recurrent_lengthgen.models import layers_conv as convolution
    from hf_recurrent_lengthgen.models import layers_mixer as scan_mixer

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor, activation: str) -> Tensor:
        return convolution.causal_conv(x.mT, weight, bias, initial_states, activation=activation == "silu")[0].mT

    causal_lm = getattr(models, f"Stateful{family}ForCausalLM")
    torch.manual_seed(0)
    model = causal_lm(causal_lm.config_class(vocab_size=11, num_hidden_layers=2, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    tokens = torch.randint(3, 11, (B, 21))
    mask = torch.ones_like(tokens)
    mask[0, 17:] = 0

    def run() -> list[Tensor]:
        first = model(tokens[:, :13], labels=tokens[:, :13])
        second = model(
            tokens[:, 13:], attention_mask=mask[:, 13:], initial_state=first.final_state, labels=tokens[:, 13:]
        )
        final = [part for layer in second.final_state for part in layer if part.numel()]
        loss = first.loss + second.loss + sum(part.square().sum() for part in final)
        return [first.logits, second.logits, *final, *torch.autograd.grad(loss, list(model.parameters()))]

    truth = run()
    scan_mixer.resolve_backend = lambda *arguments: "kernel"
    convolution.causal_conv1d_fn = convolve
    kernel = run()
    errors = [float(((k - t).abs().max() / t.abs().max()).detach()) for k, t in zip(kernel, truth, strict=True)]
    print(f"{family} model: {max(errors):.0e}")
    assert max(errors) <= 2e-5, errors


def compare_mamba2_model() -> None:
    fields = {"hidden_size": 16, "num_heads": H, "head_dim": P, "state_size": N, "n_groups": G, "chunk_size": 16}
    compare_model("Mamba2", **fields, residual_in_fp32=False)


def compare_gla_model() -> None:
    fields = {"hidden_size": 24, "num_heads": 2, "expand_v": 2.0, "intermediate_size": 8, "use_short_conv": True}
    compare_model("GLA", **fields)


def compare_rwkv6_model() -> None:
    fields = {"hidden_size": 24, "num_heads": 2, "proj_low_rank_dim": 4, "gate_low_rank_dim": 4}
    compare_model("RWKV6", **fields, intermediate_size=8)


def compare_rwkv7_model() -> None:
    ranks = {f"{part}_low_rank_dim": 4 for part in ("decay", "a", "gate", "v")}
    replace_gather()
    compare_model("RWKV7", hidden_size=24, head_dim=12, intermediate_size=8, **ranks)


def compare_gated_deltanet_model() -> None:
    fields = {"hidden_size": 24, "num_heads": 2, "head_dim": 8, "intermediate_size": 8, "num_v_heads": 4}
    compare_model("GatedDeltaNet", **fields)


if __name__ == "__main__":
    import scan_definitions as definitions
    from triton_interpreter import stand_in_for_a_gpu

    torch.set_num_threads(1)
    stand_in_for_a_gpu()
    globals()[f"compare_{sys.argv[1]}"]()
