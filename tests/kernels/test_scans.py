"""The kernels of mamba-ssm and fla, as the scans call them, against the definitions."""

from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.models import scan_delta, scan_fla_kernels, scan_ssd, scan_trapezoid
from tests.models import scans
from tests.models.law import assert_equal_up_to
from tests.models.test_scans import run

PER_CHANNEL = " by channel"  # as on a Hopper GPU with Triton 3.4 to 3.7.0, where fla refuses one gate per head
NAMES = [
    *("ssd-1-groups", "ssd-2-groups", "gla", "rwkv6", "delta-scalar", "delta-channels", "dplr", "trapezoid"),
    *(f"delta-scalar{PER_CHANNEL}", f"trapezoid{PER_CHANNEL}"),
]


@pytest.mark.filterwarnings("ignore:ChunkDeltaRuleFunction does not support float32:RuntimeWarning")
@pytest.mark.parametrize("case", NAMES)
def test_a_kernel_is_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, final states and all gradients; whole, and in two chunks of time and one row at a time."""
    name = case.removesuffix(PER_CHANNEL)
    if name != case:
        for module in (scan_delta, scan_trapezoid):
            monkeypatch.setattr(module, "refuses_gates_of_heads", lambda _: True)
        monkeypatch.setattr(scan_delta, "chunk_gated_delta_rule", None)
        monkeypatch.setattr(scan_trapezoid, "chunk_simple_gla", None)
    if name == "dplr":  # the interpreter replaces functions of tl, not names imported from it
        import triton.language as tl
        from fla.ops.generalized_delta_rule.dplr import chunk_A_bwd, chunk_A_fwd

        def gather(*arguments: Any, **options: Any) -> Any:
            return tl.gather(*arguments, **options)

        for kernels in (chunk_A_fwd, chunk_A_bwd):
            monkeypatch.setattr(kernels, "gather", gather)
    scan = next(scan for scan in scans.SCANS if scan.name == name)
    # as wide and high as to fill no block of a kernel, and different: a state taken for its transpose shows
    heads, width, state = (4, 8, 8) if "ssd" in name else (2, 20, 12)
    monkeypatch.setattr(scans, "P", width)
    monkeypatch.setattr(scans, "N", state)
    options = {"chunk_size": 16} if "ssd" in name else {}
    # whole, over borders of chunks, which have 16 or 64 tokens; in chunks. By channel, the kernel is another case's
    long = 33 if "chunk_size" in options or name == "dplr" else 65
    for length in (3,) if name != case else (1, long, 5):
        if length == 5:
            heads = heads // 2
            monkeypatch.setattr(scan_fla_kernels, "_KERNEL_MAX_TOKENS", 3)
            monkeypatch.setattr(scan_fla_kernels, "_KERNEL_MAX_HEADS", heads)
            monkeypatch.setattr(scan_ssd, "_KERNEL_MAX_TOKENS", 3)
            monkeypatch.setattr(scan_ssd, "_KERNEL_MAX_CHUNKS", 1)
        inputs = scan.make_inputs(length, torch.float32, heads=heads)
        exact = run(scan, scan.reference, {name: value.double() for name, value in inputs.items()})
        kernel = run(scan, scan.scan, inputs, backend="kernel", **options)
        assert_equal_up_to(2e-5, {name: value.double() for name, value in kernel.items()}, exact)
