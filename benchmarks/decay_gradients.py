"""Error of the gradients of decays in float32, of every scan and of its loop over time, over rates and steps.

    python benchmarks/decay_gradients.py
    python benchmarks/decay_gradients.py --against d2a4e98     Mamba-2 beside another commit, and their times

A cell is the error against the loop in float64, relative by norm, of the chunked form and of the loop. The gradient
is that of A, one rate per head (Mamba-1: per channel), or of the log decays of one head in GLA and RWKV-6. Steps
vary by 10 % from token to token; "mixed" takes them from 1e-4 to 5.
"""

import argparse
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import measure  # noqa: F401  (it finds tests/models, where the definitions of scans are)
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.scan_gla import scan_gla
from hf_recurrent_lengthgen.models.scan_rwkv6 import scan_rwkv6
from hf_recurrent_lengthgen.models.scan_selective import scan_selective
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd
from tests.models.scan_definitions import (
    scan_gla_reference,
    scan_rwkv6_reference,
    scan_selective_reference,
    scan_ssd_reference,
)

B, T, P, N = 2, 256, 16, 16
RATES = torch.tensor([1e-3, 1e-2, 0.1, 1, 4, 16, 64, 1e3, 1e4], dtype=torch.float64)
STEPS = [1e-4, 1e-2, 0.1, 0.5, 1, 2, 5]
H = len(RATES)

Scan = Callable[..., tuple[Tensor, Tensor]]


def ssd_inputs(steps: Tensor) -> list[Tensor]:
    """A first, as in the others what the table is about."""
    x, b, c, state = torch.randn(B, T, H, P), torch.randn(B, T, 1, N), torch.randn(B, T, 1, N), torch.randn(B, H, P, N)
    return [-RATES, x, steps.expand(B, T, H), b, c, torch.randn(H), state]


def selective_inputs(steps: Tensor) -> list[Tensor]:
    x, b, c, state = torch.randn(B, T, H), torch.randn(B, T, N), torch.randn(B, T, N), torch.randn(B, H, N)
    return [-RATES[:, None].repeat(1, N), x, steps.expand(B, T, H), b, c, torch.randn(H), state]


def gla_inputs(steps: Tensor) -> list[Tensor]:
    q, k, v, state = (torch.randn(shape) for shape in ((B, T, H, N), (B, T, H, N), (B, T, H, P), (B, H, P, N)))
    return [-(steps * RATES)[..., None] * (1 + 0.1 * torch.rand(B, T, H, N)), q, k, v, state]


def rwkv6_inputs(steps: Tensor) -> list[Tensor]:
    *inputs, state = gla_inputs(steps)
    return [*inputs, torch.randn(H, N), state]


def mamba(scan: Scan) -> Scan:
    return lambda A, x, dt, *others: scan(x, dt, A, *others)


def gated(scan: Scan) -> Scan:
    return lambda g, q, k, v, *others: scan(q, k, v, g, *others)


SCANS: dict[str, tuple[Scan, Scan, Callable[[Tensor], list[Tensor]]]] = {
    "Mamba-2": (mamba(scan_ssd), mamba(scan_ssd_reference), ssd_inputs),
    "Mamba-1": (mamba(scan_selective), mamba(scan_selective_reference), selective_inputs),
    "GLA": (gated(scan_gla), gated(scan_gla_reference), gla_inputs),
    "RWKV-6": (gated(scan_rwkv6), gated(scan_rwkv6_reference), rwkv6_inputs),
}


def gradient_by_rate(scan: Scan, inputs: list[Tensor], weights: tuple[Tensor, Tensor]) -> Tensor:
    """Gradient of the first input, (H, ...)."""
    decays = inputs[0].clone().requires_grad_()
    results = scan(decays, *inputs[1:])
    (gradient,) = torch.autograd.grad(sum((r * w.to(r)).sum() for r, w in zip(results, weights, strict=True)), decays)
    return gradient.double() if gradient.ndim < 3 else gradient.double().transpose(0, 2)


def scan_at(commit: str) -> Scan:
    """`scan_ssd` as it was; the files that it imports are those of today."""
    file = "hf_recurrent_lengthgen/models/scan_ssd.py"
    command = ["git", "show", f"{commit}:{file}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    names: dict[str, Any] = {"__name__": "then"}
    exec(compile(done.stdout.replace("from .", "from hf_recurrent_lengthgen.models."), file, "exec"), names)
    scan: Scan = names["scan_ssd"]
    return scan


def print_times(then: Scan, pairs: int = 100) -> None:
    """Forward and backward in float32, in turns: processor time of today's scan over that of `then`, and its range."""
    torch.set_num_threads(1)
    for rows, length, heads, head_dim, groups, state_dim in (
        (1, 128, 24, 64, 1, 128),
        (4, 64, 24, 64, 1, 128),
        (2, 128, 16, 64, 4, 64),
    ):
        torch.manual_seed(0)
        x, state = torch.randn(rows, length, heads, head_dim), torch.randn(rows, heads, head_dim, state_dim)
        b, c = torch.randn(2, rows, length, groups, state_dim)
        steps, rates, skip = 0.1 * torch.rand(rows, length, heads), -torch.rand(heads), torch.randn(heads)
        inputs = [t.requires_grad_() for t in (x, steps, rates, b, c, skip, state)]
        ratios = []
        for turn in range(pairs + 5):
            seconds = {}
            for scan in (scan_ssd, then) if turn % 2 else (then, scan_ssd):
                start = time.process_time()
                torch.autograd.grad(sum(result.sum() for result in scan(*inputs)), inputs)
                seconds[scan] = time.process_time() - start
            ratios.append(seconds[scan_ssd] / seconds[then])
        ratios = sorted(ratios[5:])
        quarters = f"{ratios[pairs // 4]:.3f} to {ratios[3 * pairs // 4]:.3f}"
        sizes = f"{rows} x {length} tokens, {heads} heads of {head_dim}, {groups} groups, N {state_dim}"
        print(f"{sizes}: {median(ratios):.3f} ({quarters})")


def main() -> None:
    """Print one table per scan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="whose scan_ssd is measured in the place of the loop")
    against = parser.parse_args().against
    scans = SCANS
    if against is not None:
        then = scan_at(against)
        print_times(then)
        scans = {f"Mamba-2, and at {against}": (*SCANS["Mamba-2"], mamba(then))}
    torch.set_default_dtype(torch.float64)
    for name, (scan, loop, make_inputs, *others) in scans.items():
        other = "that" if others else "loop"
        print(f"\n{name}: rate, then chunked form / {other} for steps {', '.join(map(str, STEPS))} and mixed")
        columns = []
        for step in [*STEPS, None]:
            torch.manual_seed(0)
            uniform = torch.rand(B, T, 1)
            steps = 10 ** (4.7 * uniform - 4) if step is None else step * (0.9 + 0.2 * uniform)
            inputs = [t.float() for t in make_inputs(steps)]
            wide = [t.double() for t in inputs]
            weights = tuple(torch.randn(r.shape) for r in loop(*wide))
            exact = gradient_by_rate(loop, wide, weights).reshape(H, -1)
            norm = exact.norm(dim=1)
            errors = [
                (gradient_by_rate(function, inputs, weights).reshape(H, -1) - exact).norm(dim=1) / norm
                for function in (scan, *(others or [loop]))
            ]
            columns.append(
                [
                    f"{ours:.0e}/{theirs:.0e}" if size > 1e-30 else "-"
                    for ours, theirs, size in zip(*errors, norm, strict=True)
                ]
            )
        for rate, *cells in zip(RATES.tolist(), *columns, strict=True):
            print(f"{rate:8g}  " + "  ".join(f"{cell:>11}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
