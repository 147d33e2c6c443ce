"""What only the scan of Mamba-3 has, beside test_scans.py: turned keys, the token before, its dtypes and kernel."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models import scan_trapezoid as module
from hf_recurrent_lengthgen.models.scan_pieces import piece_trapezoid
from hf_recurrent_lengthgen.models.scan_trapezoid import scan_trapezoid

from . import test_scans
from .law import assert_equal_up_to
from .scan_definitions import scan_gla_reference, scan_trapezoid_reference
from .scans import TRAPEZOID, trapezoid_inputs

N, A = 5, 2
run = partial(test_scans.run, TRAPEZOID)


def loop(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """arXiv:2603.15569 with its own frame by single entries: keys and queries are turned by all angles so far."""
    outputs, finals = torch.zeros_like(x[:, 1:]), torch.zeros_like(initial_state)
    for b in range(len(x)):
        for h in range(x.shape[2]):
            S, angle = initial_state[b, h], torch.zeros(A, dtype=dt.dtype)
            before = torch.outer(x[b, 0, h], B[b, 0, h])
            for t in range(dt.shape[1]):
                alpha, step, now = g[b, t, h].exp(), dt[b, t, h], share[b, t, h]
                angle = angle + step * w[b, t]
                R = torch.eye(N, dtype=dt.dtype)
                for i in range(A):
                    cos, sin = angle[i].cos(), angle[i].sin()
                    R[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.stack([cos, -sin, sin, cos]).view(2, 2)
                written = torch.outer(x[b, t + 1, h], R @ B[b, t + 1, h])
                S = alpha * S + (1 - now) * step * alpha * before + now * step * written
                before = written
                outputs[b, t, h] = S @ (R @ C[b, t, h]) + D[h] * x[b, t + 1, h]
            finals[b, h] = S @ R  # R^T turns back
    return outputs, finals


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_reference_is_the_equation(length: int) -> None:
    inputs = trapezoid_inputs(length)
    assert_equal_up_to(1e-12, run(scan_trapezoid_reference, inputs), run(loop, inputs))


def test_all_keys_may_turn() -> None:
    inputs = trapezoid_inputs(20)
    inputs |= {name: inputs[name][..., : 2 * A] for name in ("B", "C", "initial_state")}
    assert_equal_up_to(1e-12, run(scan_trapezoid, inputs), run(scan_trapezoid_reference, inputs))


def test_a_piece_is_an_affine_map() -> None:
    """Of a state as large as the others, with all gradients."""
    inputs = trapezoid_inputs(70)

    def through_the_map(initial_state: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
        found = piece_trapezoid(**others)
        assert found.is_matrix
        return scan_trapezoid(**others, initial_state=initial_state)[0], initial_state @ found.factor + found.written

    assert_equal_up_to(1e-12, run(through_the_map, inputs), run(scan_trapezoid, inputs))


@torch.no_grad()
def test_angles_keep_their_precision_over_thousands_of_turns() -> None:
    """In float32, a sum of 2,000 angles of up to 30 has lost three digits; decays are weak."""
    inputs = trapezoid_inputs(2_000)
    inputs |= {"g": 1e-3 * inputs["g"], "w": inputs["w"].abs() * 20}
    rounded = {name: value.float() for name, value in inputs.items()}
    exact = scan_trapezoid_reference(**{name: value.double() for name, value in rounded.items()})
    for found, expected in zip(scan_trapezoid(**rounded), exact, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["dt", "share", "x", "B", "C"])
def test_what_is_not_finite_reaches_no_output_before_its_token(name: str) -> None:
    inputs = trapezoid_inputs(100, torch.float32)
    expected = scan_trapezoid(**inputs)[0]
    inputs[name] = inputs[name].clone()
    inputs[name][:, 50 + (name in ("x", "B"))] = float("nan")
    y = scan_trapezoid(**inputs)[0]
    torch.testing.assert_close(y[:, :50], expected[:, :50])
    assert y[:, 50].isnan().any()


def test_later_tokens_have_no_influence_at_all() -> None:
    """Not even of rounding, which Adam would make steps of."""
    inputs = {name: value.requires_grad_() for name, value in trapezoid_inputs(70, torch.float32).items()}
    gradients = torch.autograd.grad(scan_trapezoid(**inputs)[0][:, :40].sum(), list(inputs.values()))
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        if value.ndim > 1 and value.shape[1] in (70, 71):
            later = 41 if name in ("x", "B") else 40
            assert not gradient[:, later:].any(), name
            assert gradient[:, later - 1].any(), name


def test_outputs_have_the_dtype_of_the_steps() -> None:
    inputs = trapezoid_inputs(20, torch.float32)
    low = {name: inputs[name].bfloat16() for name in ("x", "B", "C")}
    y, state = scan_trapezoid(**(inputs | low))
    assert (y.dtype, state.dtype) == (torch.float32, torch.float32)
    widened = {name: value.float() for name, value in low.items()}
    torch.testing.assert_close((y, state), scan_trapezoid(**(inputs | widened)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_kernel_gets_turned_keys_and_scaled_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's `chunk_simple_gla`, whose states are (B, H, N, P) and gates (B, T, H), played by the definition of GLA."""
    inputs = trapezoid_inputs(20)

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, **_: Any) -> Any:
        assert (q.dtype, k.dtype, v.dtype, scale) == (dtype, dtype, dtype, 1.0)
        assert g.shape == q.shape[:3]
        y, state = scan_gla_reference(*(t.double() for t in (q, k, v)), g[..., None].expand_as(q), initial_state.mT)
        return y, state.mT

    monkeypatch.setattr(module, "chunk_simple_gla", kernel)
    low = {name: inputs[name].to(dtype) for name in ("x", "B", "C")}
    found = run(scan_trapezoid, inputs | low, backend="kernel")
    widened = {name: value.to(torch.float64) for name, value in low.items()}
    expected = run(scan_trapezoid, inputs | widened)
    assert found["y"].dtype == torch.float64
    found |= {name: value.double() for name, value in found.items()}
    assert_equal_up_to(1e-12 if dtype == torch.float64 else 0.03, found, expected)


# as in test_scans.py
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.slow
def test_a_compiled_scan_is_one_graph_at_every_length() -> None:
    torch._dynamo.reset()

    def scan(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        return scan_trapezoid(**inputs, chunk_size=8)

    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for length in (1, 20, 13):
        inputs = trapezoid_inputs(length)
        assert_equal_up_to(1e-12, run(compiled, inputs), run(scan, inputs))
