"""mamba-ssm's scan kernel against the definition without a GPU: Triton's interpreter runs it on a CPU.

Needs triton, einops and mamba-ssm; its CUDA extension is not needed:
MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm

The interpreter is chosen when triton is imported, so everything runs in a process of its own, this file as a script.
"""

import contextlib
import importlib.util
import math
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

MISSING = [name for name in ("triton", "mamba_ssm") if importlib.util.find_spec(name) is None]
B, H, P, N, G = 2, 4, 8, 8, 2


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs triton and mamba_ssm, cannot import {MISSING}")
def test_the_interpreted_kernel_is_the_definition() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert script.returncode == 0, script.stdout + script.stderr


def stand_in_for_a_gpu() -> None:
    """One autotune configuration, no CUDA device, bfloat16 products as floats instead of bit patterns."""
    import numpy
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    autotune, builder = triton.autotune, interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def smallest(configs: list[Any], **options: Any) -> Any:
        return autotune([min(configs, key=lambda config: math.prod(config.kwargs.values()))], **options)

    def widen(value: Any) -> Any:
        if value.dtype != tl.bfloat16:
            return value
        bits = value.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

    triton.autotune = smallest
    builder.create_dot = lambda self, a, b, *rest: create_dot(self, widen(a), widen(b), *rest)
    gpu: Any = torch.cuda
    gpu.device = contextlib.nullcontext
    gpu.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=4)
    sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")


def run(scan: Any, length: int, dtype: torch.dtype, padding: int, exact: bool = False, **options: Any) -> list[Tensor]:
    """Outputs, final state and all gradients; x, B and C are slices of one projection as in the layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"xBC": (B, length, H * P + 2 * G * N), "dt": (B, length, H), "D": (H,), "state": (B, H, P, N)}
    leaves = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    leaves["dt"] = leaves["dt"].abs() / 2
    leaves["xBC"] = leaves["xBC"].to(dtype)
    leaves["A"] = -torch.arange(1.0, H + 1)
    leaves = {name: (leaf.double() if exact else leaf).requires_grad_() for name, leaf in leaves.items()}
    dt = torch.cat([leaves["dt"][:, : length - padding], 0 * leaves["dt"][:, length - padding :]], dim=1)
    x, B_, C = leaves["xBC"].split([H * P, G * N, G * N], -1)
    y, state = scan(
        x.unflatten(-1, (H, P)),
        dt,
        leaves["A"],
        B_.unflatten(-1, (G, N)),
        C.unflatten(-1, (G, N)),
        leaves["D"],
        leaves["state"],
        **options,
    )
    weights = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in (y, state)]
    objective = (y * weights[0]).sum() + (state * weights[1]).sum()
    return [y.detach(), state.detach(), *torch.autograd.grad(objective, list(leaves.values()))]


def compare_scans() -> None:
    from hf_recurrent_lengthgen.models import scan_ssd as module

    def check(length: int, tolerance: float, dtype: torch.dtype = torch.float32, padding: int = 0) -> None:
        kernel = run(module.scan_ssd, length, dtype, padding, chunk_size=16, backend="kernel")
        truth = run(module.scan_ssd_reference, length, dtype, padding, exact=True)
        errors = [float((k - t).abs().max() / t.abs().max()) for k, t in zip(kernel, truth, strict=True)]
        print(length, dtype, " ".join(f"{error:.0e}" for error in errors))
        assert all(error <= tolerance for error in errors), errors

    check(1, 2e-6)
    check(37, 4e-6, padding=6)
    check(37, 2e-2, torch.bfloat16)
    module._KERNEL_MAX_TOKENS, module._KERNEL_MAX_CHUNKS = 20, 2  # two pieces in time, one row at a time
    check(37, 4e-6, padding=6)


def compare_models() -> None:
    """The layer with the scan kernel: outputs, final states, gradients, and a split with the state carried."""
    from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM
    from hf_recurrent_lengthgen.models import layers_mamba2

    layers: Any = layers_mamba2
    convolve, resolve = layers.causal_conv, layers.resolve_backend
    config = StatefulMamba2Config(
        vocab_size=11, hidden_size=16, num_heads=H, head_dim=P, state_size=N, n_groups=G, num_hidden_layers=2,
        chunk_size=16, residual_in_fp32=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(config)
    tokens = torch.randint(3, 11, (B, 21))
    mask = torch.ones_like(tokens)
    mask[0, 17:] = 0

    def results() -> list[Tensor]:
        first = model(tokens[:, :13], labels=tokens[:, :13])
        second = model(
            tokens[:, 13:], attention_mask=mask[:, 13:], initial_state=first.final_state, labels=tokens[:, 13:]
        )
        final = [part for layer in second.final_state for part in layer]
        loss = first.loss + second.loss + sum(part.square().sum() for part in final)
        return [first.logits, second.logits, *final, *torch.autograd.grad(loss, list(model.parameters()))]

    truth = results()
    layers.causal_conv = lambda *arguments: convolve(*arguments[:5], "torch")
    layers.resolve_backend = lambda *arguments: "kernel"
    try:
        kernel = results()
    finally:
        layers.causal_conv, layers.resolve_backend = convolve, resolve
    errors = [float(((k - t).abs().max() / t.abs().max()).detach()) for k, t in zip(kernel, truth, strict=True)]
    print("model", f"{max(errors):.0e}")
    assert max(errors) <= 1e-5, errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_in_for_a_gpu()
    compare_scans()
    compare_models()
