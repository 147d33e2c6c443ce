"""The SSD scan against its definition: outputs, final state, every gradient, any length, any split, any decay."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_recurrent_lengthgen.models import scan_ssd as scan_module
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd, scan_ssd_reference

from .law import assert_equal_up_to

LENGTHS = [1, 2, 3, 63, 64, 65, 200]
Inputs = dict[str, Tensor]


def make_inputs(
    length: int, groups: int = 2, dtype: torch.dtype = torch.float64, heads: int = 4, rate: float = 1.0, seed: int = 0
) -> Inputs:
    """Random scan arguments; decays exp(-rate * dt) with dt uniform up to 0.5 times 1..H."""
    generator = torch.Generator().manual_seed(seed)
    batch, head_dim, state_dim = 2, 3, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "x": normal(batch, length, heads, head_dim),
        "dt": torch.rand(batch, length, heads, generator=generator, dtype=torch.float64).to(dtype) / 2,
        "A": -rate * torch.arange(1, heads + 1, dtype=dtype),
        "B": normal(batch, length, groups, state_dim),
        "C": normal(batch, length, groups, state_dim),
        "D": normal(heads),
        "initial_state": normal(batch, heads, head_dim, state_dim),
    }


def loop(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Eq. 1 and 4 of arXiv:2507.02782 by single entries: batch row, token and head in plain loops."""
    heads_per_group = x.shape[2] // B.shape[2]
    rows, finals = [], []
    for b in range(x.shape[0]):
        h = [initial_state[b, k] for k in range(x.shape[2])]
        tokens = []
        for t in range(x.shape[1]):
            for k in range(x.shape[2]):
                h[k] = (dt[b, t, k] * A[k]).exp() * h[k] + dt[b, t, k] * torch.outer(
                    x[b, t, k], B[b, t, k // heads_per_group]
                )
            tokens.append(
                torch.stack([h[k] @ C[b, t, k // heads_per_group] + D[k] * x[b, t, k] for k in range(x.shape[2])])
            )
        rows.append(torch.stack(tokens))
        finals.append(torch.stack(h))
    return torch.stack(rows), torch.stack(finals)


def run(scan: object, inputs: Inputs, cuts: tuple[int, ...] = (), **options: object) -> dict[str, Tensor]:
    """Outputs, final state and gradients of a random functional of both."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    state, outputs, length = leaves["initial_state"], [], inputs["x"].shape[1]
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        over_time = {name: leaves[name][:, start:stop] for name in ("x", "dt", "B", "C")}
        y, state = scan(A=leaves["A"], D=leaves["D"], initial_state=state, **over_time, **options)  # type: ignore[operator]
        outputs.append(y)
    y = torch.cat(outputs, 1)
    generator = torch.Generator().manual_seed(7)
    functional = sum(
        (r * torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype)).sum() for r in (y, state)
    )
    gradients = torch.autograd.grad(functional, list(leaves.values()))
    named = {f"gradient of {name}": value for name, value in zip(leaves, gradients, strict=True)}
    return {"y": y.detach(), "final state": state.detach()} | named


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_reference_is_the_equation(length: int, groups: int) -> None:
    inputs = make_inputs(min(length, 66), groups)
    assert_equal_up_to(1e-12, run(scan_ssd_reference, inputs), run(loop, inputs))


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 256])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_chunked_form_equals_the_definition(length: int, groups: int, chunk_size: int) -> None:
    inputs = make_inputs(length, groups)
    assert_equal_up_to(1e-12, run(scan_ssd, inputs, chunk_size=chunk_size), run(scan_ssd_reference, inputs))


@pytest.mark.parametrize("length", LENGTHS)
def test_float32_stays_close_to_float64(length: int) -> None:
    inputs = make_inputs(length)
    exact = run(scan_ssd_reference, inputs)
    single = {name: value.float() for name, value in inputs.items()}
    chunked = {name: value.double() for name, value in run(scan_ssd, single).items()}
    assert_equal_up_to(5e-5, chunked, exact)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_any_split_equals_the_whole(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 200))
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=6))))
    groups = data.draw(st.sampled_from([1, 2, 4]))
    chunk_size = data.draw(st.sampled_from([3, 16, 64]))
    inputs = make_inputs(length, groups)
    assert_equal_up_to(1e-11, run(scan_ssd, inputs, cuts, chunk_size=chunk_size), run(scan_ssd, inputs))
    single = {name: value.float() for name, value in inputs.items()}
    assert_equal_up_to(1e-4, run(scan_ssd, single, cuts, chunk_size=chunk_size), run(scan_ssd, single))


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_are_those_of_finite_differences(groups: int) -> None:
    inputs = [value.requires_grad_() for value in make_inputs(5, groups, heads=2).values()]
    assert torch.autograd.gradcheck(lambda *leaves: scan_ssd(*leaves, chunk_size=2), inputs)


def test_one_token_by_hand() -> None:
    """h = e^{-0.5 * 2} * 3 + 0.5 * 4 * 5 = 3/e + 10 and y = 7 h + 6 * 4."""
    one = {"x": 4.0, "dt": 0.5, "B": 5.0, "C": 7.0}
    y, state = scan_ssd(
        A=torch.tensor([-2.0]),
        D=torch.tensor([6.0]),
        initial_state=torch.full((1, 1, 1, 1), 3.0),
        **{name: torch.full((1, 1, 1) if name == "dt" else (1, 1, 1, 1), value) for name, value in one.items()},
    )
    assert state.item() == pytest.approx(3 / math.e + 10)
    assert y.item() == pytest.approx(7 * (3 / math.e + 10) + 24, rel=1e-6)


def test_a_step_of_zero_leaves_the_state_as_it_is() -> None:
    inputs = make_inputs(70, dtype=torch.float32)
    inputs["dt"] = torch.zeros_like(inputs["dt"])
    _, state = scan_ssd(**inputs)
    assert torch.equal(state, inputs["initial_state"])


@pytest.mark.parametrize("rate", [100.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decays_that_erase_everything_are_exact_and_finite(rate: float, dtype: torch.dtype) -> None:
    """exp(dt A) underflows for every token: y_t = (dt_t C_t . B_t + D) x_t, and nothing of the past is left."""
    inputs = make_inputs(130, dtype=dtype, rate=rate)
    inputs["dt"] = inputs["dt"] + 10
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    y, state = scan_ssd(**leaves)
    CB = (inputs["C"] * inputs["B"]).sum(-1).repeat_interleave(2, dim=2)
    expected = (inputs["dt"] * CB + inputs["D"])[..., None] * inputs["x"]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    gradients = dict(zip(leaves, torch.autograd.grad(y.sum() + state.sum(), list(leaves.values())), strict=True))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert (gradients["initial_state"] == 0).all()
    # one token deep: dt_t enters y_t as (C . B) sum(x), and the last one also the state
    expected_dt = CB * inputs["x"].sum(-1)
    expected_dt[:, -1] += (inputs["B"][:, -1].sum(-1).repeat_interleave(2, dim=1)) * inputs["x"][:, -1].sum(-1)
    scale = rate * 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(gradients["dt"], expected_dt, rtol=1e-5, atol=max(1e-5, 100 * scale))


def test_weak_decays_after_a_strong_one_keep_their_precision() -> None:
    """A reset (dt A = -1000) in a chunk must not blur the small decays of the tokens after it."""
    inputs = make_inputs(128, rate=100.0)
    inputs["dt"] = inputs["dt"] * 1e-2
    inputs["dt"][:, [3, 20, 21, 40, 90]] = 10.0
    exact = run(scan_ssd_reference, inputs)
    single = run(scan_ssd, {name: value.float() for name, value in inputs.items()})
    for name in ("y", "final state", "gradient of x", "gradient of B", "gradient of C", "gradient of initial_state"):
        error = (single[name] - exact[name]).norm() / exact[name].norm()
        assert error < 2e-6, (name, float(error))


def test_gradients_reach_the_initial_and_leave_the_final_state() -> None:
    """With one token of decay e^{dt A} the state's gradient is that decay times the final state's, plus C's part."""
    inputs = make_inputs(1)
    start = inputs["initial_state"].requires_grad_()
    _, final = scan_ssd(**inputs)
    weights = torch.randn(final.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (gradient,) = torch.autograd.grad((final * weights).sum(), start)
    decay = (inputs["dt"][:, 0] * inputs["A"]).exp()[..., None, None]
    torch.testing.assert_close(gradient, decay * weights)


def test_the_arguments_are_not_changed() -> None:
    inputs = make_inputs(70)
    copies = {name: value.clone() for name, value in inputs.items()}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan_ssd(**leaves)
    (y.sum() + state.sum()).backward()
    assert all(torch.equal(inputs[name], copies[name]) for name in copies)


def test_results_keep_the_dtype_of_inputs_and_state() -> None:
    inputs = make_inputs(9, dtype=torch.float32)
    low = {name: inputs[name].bfloat16() for name in ("x", "B", "C")}
    y, state = scan_ssd(**(inputs | low))
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = scan_ssd_reference(**(inputs | {name: value.float() for name, value in low.items()}))
    assert torch.equal(y, exact.bfloat16()) or (y - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_does_not_touch_the_recurrence(backward_inside: bool) -> None:
    inputs = {name: value.requires_grad_() for name, value in make_inputs(70, dtype=torch.float32).items()}
    y, state = scan_ssd(**inputs)
    expected = torch.autograd.grad(y.sum() + state.sum(), list(inputs.values()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_autocast, state = scan_ssd(**inputs)
        loss = y_autocast.sum() + state.sum()
        if backward_inside:
            gradients = torch.autograd.grad(loss, list(inputs.values()))
    if not backward_inside:
        gradients = torch.autograd.grad(loss, list(inputs.values()))
    assert torch.equal(y, y_autocast)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_bad_settings_are_refused() -> None:
    inputs = make_inputs(3)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        scan_ssd(**inputs, chunk_size=0)
    with pytest.raises(ValueError, match=r'backend must be "torch" or "kernel", got \'auto\''):
        scan_ssd(**inputs, backend="auto")  # type: ignore[arg-type]


def test_the_kernel_is_refused_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "mamba_chunk_scan_combined", None)
    with pytest.raises(ValueError, match=r'needs mamba-ssm .* pip install "hf_recurrent_lengthgen\[kernels\]"'):
        scan_ssd(**make_inputs(3), backend="kernel")


def test_long_inputs_go_through_the_kernel_in_pieces_with_the_state_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the kernel's interface counts the pieces; results equal one scan of everything."""
    lengths = []

    def kernel(x, dt, A, B, C, chunk_size, D, initial_states, return_final_states):  # type: ignore[no-untyped-def]
        assert return_final_states
        lengths.append(x.shape[1])
        return scan_ssd_reference(x, dt, A, B, C, D, initial_states)

    monkeypatch.setattr(scan_module, "mamba_chunk_scan_combined", kernel)
    monkeypatch.setattr(scan_module, "_KERNEL_MAX_TOKENS", 30)
    inputs = make_inputs(65)
    assert_equal_up_to(1e-12, run(scan_ssd, inputs, backend="kernel"), run(scan_ssd_reference, inputs))
    assert lengths == [30, 30, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_the_chunked_form_equals_the_definition_on_a_gpu(length: int) -> None:
    inputs = {name: value.cuda() for name, value in make_inputs(length).items()}
    truth = {name: value.cuda() for name, value in run(scan_ssd_reference, make_inputs(length)).items()}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan_ssd(**leaves)
    assert_equal_up_to(1e-11, {"y": y, "s": state}, {"y": truth["y"], "s": truth["final state"]})
