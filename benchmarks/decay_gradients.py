"""Error of the gradients of decays in float32, of every scan and of its loop over time, over rates and steps.

    python benchmarks/decay_gradients.py

A cell is the error against the loop in float64, relative by norm, of the chunked form and of the loop. The gradient
is that of A, one rate per head (Mamba-1: per channel), or of the log decays of one head in GLA and RWKV-6. Steps
vary by 10 % from token to token; "mixed" takes them from 1e-4 to 5.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.scan_gla import scan_gla, scan_gla_reference
from hf_recurrent_lengthgen.models.scan_rwkv6 import scan_rwkv6, scan_rwkv6_reference
from hf_recurrent_lengthgen.models.scan_selective import scan_selective, scan_selective_reference
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd, scan_ssd_reference

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


def main() -> None:
    """Print one table per scan."""
    torch.set_default_dtype(torch.float64)
    for name, (scan, loop, make_inputs) in SCANS.items():
        print(f"\n{name}: rate, then chunked form / loop for steps {', '.join(map(str, STEPS))} and mixed")
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
                for function in (scan, loop)
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
