"""The kernels of mamba-ssm and fla against the definitions without a GPU: Triton's interpreter runs them on a CPU.

Needs triton, einops and, each for its part, flash-linear-attention and mamba-ssm, whose CUDA extension is not needed:
MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm

The interpreter is chosen when triton is imported, and fla replaces classes that Transformers registers, so each part
runs in a process of its own: this file as a module.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PER_CHANNEL = " by channel"  # as on a Hopper GPU with Triton 3.4 to 3.7.0, where fla refuses one gate per head
PARTS = {
    **dict.fromkeys(("ssd-1-groups", "ssd-2-groups"), "mamba_ssm"),
    **dict.fromkeys(("gla", "rwkv6", "delta-scalar", "delta-channels", "dplr", "trapezoid"), "fla"),
    **dict.fromkeys((f"delta-scalar{PER_CHANNEL}", f"trapezoid{PER_CHANNEL}"), "fla"),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_the_interpreted_kernel_is_the_definition(part: str) -> None:
    missing = [name for name in ("triton", "einops", PARTS[part]) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {missing}, which cannot be imported here")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.models.test_kernels_interpreter", part]
    root = Path(__file__).parents[2]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=root)
    assert script.returncode == 0, script.stdout + script.stderr


def compare(part: str) -> None:
    """Outputs, final states and all gradients; whole, and in two pieces of time and one row at a time."""
    from hf_recurrent_lengthgen.models import scan_delta, scan_fla_kernels, scan_ssd, scan_trapezoid

    from . import scans
    from .law import assert_equal_up_to
    from .test_scans import run

    name = part.removesuffix(PER_CHANNEL)
    if name != part:
        for module in (scan_delta, scan_trapezoid):
            module.refuses_gates_of_heads = lambda _: True  # type: ignore[attr-defined]
        scan_delta.chunk_gated_delta_rule = scan_trapezoid.chunk_simple_gla = None
    if name == "dplr":  # the interpreter replaces functions of tl, not names imported from it
        import triton.language as tl
        from fla.ops.generalized_delta_rule.dplr import chunk_A_bwd, chunk_A_fwd

        for kernels in (chunk_A_fwd, chunk_A_bwd):
            kernels.gather = lambda *arguments, **options: tl.gather(*arguments, **options)
    scan = next(scan for scan in scans.SCANS if scan.name == name)
    # as wide and high as to fill no block of a kernel, and different: a state taken for its transpose shows
    heads, scans.P, scans.N = (4, 8, 8) if "ssd" in name else (2, 20, 12)
    options = {"chunk_size": 16} if "ssd" in name else {}
    for length in (1, 70, 71):
        if length == 71:
            scan_fla_kernels._KERNEL_MAX_TOKENS, scan_fla_kernels._KERNEL_MAX_HEADS = 64, heads
            scan_ssd._KERNEL_MAX_TOKENS, scan_ssd._KERNEL_MAX_CHUNKS = 40, 3
        inputs = scan.make_inputs(length, torch.float32, heads=heads)
        exact = run(scan, scan.reference, {name: value.double() for name, value in inputs.items()})
        kernel = run(scan, scan.scan, inputs, backend="kernel", **options)
        assert_equal_up_to(2e-5, {name: value.double() for name, value in kernel.items()}, exact)


if __name__ == "__main__":
    from .triton_interpreter import stand_in_for_a_gpu

    torch.set_num_threads(1)
    stand_in_for_a_gpu()
    compare(sys.argv[1])
