"""Every scan against its definition: outputs, final state, every gradient, any length, any split, any decay."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .law import assert_equal_up_to
from .scans import DELTA, MATRICES, SCANS, TRAPEZOID, Inputs, Scan

LENGTHS = [1, 2, 3, 63, 64, 65, 200]
every_scan = pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.name)
every_length = pytest.mark.parametrize("length", LENGTHS)


def run(
    scan: Scan, function: object, inputs: Inputs, cuts: tuple[int, ...] = (), **options: object
) -> dict[str, Tensor]:
    """Outputs, final state and gradients of a random functional of both; `function` is one of those of `scan`."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    outputs, length, carried = [], inputs[scan.over_time[0]].shape[1], leaves
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        piece = {name: leaves[name][:, start:stop] for name in scan.over_time}
        piece |= {name: leaves[name][:, start : stop + 1] for name in scan.before}
        y, state = function(**(carried | piece), **options)  # type: ignore[operator]
        carried = carried | {"initial_state": state}
        outputs.append(y)
    y = torch.cat(outputs, 1)
    generator = torch.Generator().manual_seed(7)
    functional = sum(
        (r * torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r)).sum() for r in (y, state)
    )
    gradients = torch.autograd.grad(functional, list(leaves.values()))
    named = {f"gradient of {name}": value for name, value in zip(leaves, gradients, strict=True)}
    return {"y": y.detach(), "final state": state.detach()} | named


@cache
def truth(scan: Scan, length: int) -> dict[str, Tensor]:
    return run(scan, scan.reference, scan.make_inputs(length))


def single(inputs: Inputs) -> Inputs:
    return {name: value.float() for name, value in inputs.items()}


@every_scan
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 256])
@every_length
def test_the_chunked_form_equals_the_definition(scan: Scan, length: int, chunk_size: int) -> None:
    chunked = run(scan, scan.scan, scan.make_inputs(length), chunk_size=chunk_size)
    assert_equal_up_to(1e-12, chunked, truth(scan, length))


@every_scan
@every_length
def test_float32_stays_close_to_float64(scan: Scan, length: int) -> None:
    chunked = run(scan, scan.scan, single(scan.make_inputs(length)))
    assert_equal_up_to(scan.error, {name: value.double() for name, value in chunked.items()}, truth(scan, length))


@pytest.mark.thinned(2)
@every_scan
@settings(max_examples=8)
@given(data=st.data())
def test_any_split_equals_the_whole(scan: Scan, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 200))
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=6))))
    chunk_size = data.draw(st.sampled_from([3, 16, 64]))
    inputs = scan.make_inputs(length)
    split = run(scan, scan.scan, inputs, cuts, chunk_size=chunk_size)
    assert_equal_up_to(1e-11, split, run(scan, scan.scan, inputs))
    inputs = single(inputs)
    split = run(scan, scan.scan, inputs, cuts, chunk_size=chunk_size)
    assert_equal_up_to(2 * scan.error, split, run(scan, scan.scan, inputs))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("scan", [scan for scan in SCANS if scan.name != "ssd-4-groups"], ids=lambda scan: scan.name)
def test_gradients_are_those_of_finite_differences(scan: Scan) -> None:
    inputs = scan.make_inputs(5, heads=2)
    leaves = [value.requires_grad_() for value in inputs.values()]

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return scan.scan(**dict(zip(inputs, leaves, strict=True)), chunk_size=2)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@every_scan
@pytest.mark.parametrize("length", [1, 70])
def test_without_decay_and_input_the_state_stays_bit_for_bit(scan: Scan, length: int) -> None:
    inputs = scan.idle(scan.make_inputs(length, dtype=torch.float32))
    _, state = scan.scan(**inputs)
    assert torch.equal(state, inputs["initial_state"])


@every_scan
def test_one_token_in_place_is_the_definition(scan: Scan) -> None:
    inputs = scan.make_inputs(1)
    state = inputs["initial_state"].clone()
    expected = run(scan, scan.reference, inputs)
    with torch.no_grad():
        y, final = scan.scan(**inputs)
        assert torch.equal(inputs["initial_state"], state)
        y_in_place, final_in_place = scan.scan(**inputs, in_place=True)
    torch.testing.assert_close(y, expected["y"], rtol=0, atol=1e-12)
    assert torch.equal(y, y_in_place)
    assert torch.equal(final, final_in_place)
    assert final_in_place.data_ptr() == inputs["initial_state"].data_ptr()


@every_scan
def test_weak_decays_after_a_strong_one_keep_their_precision(scan: Scan) -> None:
    """A reset (a decay of e^-1000) in a chunk must not blur the small decays of the tokens after it."""
    inputs = scan.resets()
    exact = run(scan, scan.reference, inputs)
    actual = run(scan, scan.scan, single(inputs))
    for name in exact:
        error = (actual[name] - exact[name]).norm() / exact[name].norm()
        assert error < 2e-6, (name, float(error))


def steps_of(pattern: str, length: int) -> Tensor:
    """A factor for the log decay of each token."""
    steps = torch.ones(length, dtype=torch.float64)
    if pattern == "one slow step among fast ones":
        steps[10::23] = 1e-5
    elif pattern == "one fast step among slow ones":
        steps *= 1e-5
        steps[10::23] = 1
    elif pattern == "mixed":
        steps = 10 ** (-5 * torch.rand(length, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    return steps


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "pattern", ["even", "one slow step among fast ones", "one fast step among slow ones", "mixed"]
)
@pytest.mark.parametrize("scan", [scan for scan in SCANS if scan is not TRAPEZOID], ids=lambda scan: scan.name)
def test_gradients_of_decays_are_accurate_entry_by_entry(scan: Scan, pattern: str) -> None:
    """For rates from 1e-3 to 1e4, one for each head, and inputs of very different size from token to token.

    The gradient of a decay may be 1e-20 of those of the inputs beside it, and must not be made of their rounding
    errors. All inputs are positive, so that it has no cancellation of its own; that of Mamba's step has, between
    what is written and the decay, and is compared with the larger of both. Turned keys would have signs.
    """
    length, rates = 130, 10.0 ** torch.arange(-3, 5, dtype=torch.float64)
    inputs = scan.make_inputs(length, heads=len(rates))
    gates = {name: inputs[name] for name in scan.decays}
    size = 10 ** (4 * torch.rand(length, generator=torch.Generator().manual_seed(6), dtype=torch.float64) - 2)
    values = "v" if "v" in inputs else "x"
    inputs = {name: value.abs() for name, value in inputs.items()} | gates
    inputs[values] = inputs[values] * size.view(-1, *[1] * (inputs[values].ndim - 2))
    if "D" in inputs:
        inputs["D"] = torch.zeros_like(inputs["D"])
    inputs = scan.paced(inputs, steps_of(pattern, length), rates)
    inputs = {name: value.float().double() for name, value in inputs.items()}

    def gradients(function: object, inputs: Inputs, **options: int) -> Inputs:
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        y, state = function(**leaves, **options)  # type: ignore[operator]
        found = torch.autograd.grad(y.sum() + state.sum(), list(leaves.values()))
        return {name: value.double() for name, value in zip(leaves, found, strict=True)}

    exact = gradients(scan.reference, inputs)
    actual = gradients(scan.scan, single(inputs), chunk_size=32)
    if scan in DELTA:  # the rule subtracts, so even the definition loses an entry now and then
        for name in exact:
            error, scale = (actual[name] - exact[name]).abs(), exact[name].abs()
            assert (error > 1e-3 * scale + 1e-30).double().mean() < 2e-3, name
            by_head = (2,) if name == "initial_state" else (0, 1)
            assert bool((error.sum(by_head) <= 1e-3 * scale.sum(by_head) + 1e-30).all()), name
        return
    for name in scan.decays:
        scale = exact[name].abs()
        if name == "dt":
            written = exact["x"] * inputs["x"]
            scale = scale + (written.sum(-1) if written.ndim == 4 else written) / inputs["dt"]
        error = (actual[name] - exact[name]).abs() - 1e-4 * scale
        assert bool((error < 1e-30).all()), (name, float((error / scale.clamp(min=1e-30)).max()))


@every_scan
def test_gradients_reach_the_initial_and_leave_the_final_state(scan: Scan) -> None:
    """With one token the gradient of the initial state is the final state's times the token's decay or transition."""
    inputs = scan.make_inputs(1)
    start = inputs["initial_state"].requires_grad_()
    _, final = scan.scan(**inputs)
    weights = torch.randn(final.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (gradient,) = torch.autograd.grad((final * weights).sum(), start)
    decay = scan.decay(inputs)
    torch.testing.assert_close(gradient, weights @ decay.mT if scan in MATRICES else decay * weights)


@every_scan
@pytest.mark.parametrize("length", [1, 70])
def test_the_arguments_are_not_changed(scan: Scan, length: int) -> None:
    inputs = scan.make_inputs(length)
    copies = {name: value.clone() for name, value in inputs.items()}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan.scan(**leaves)
    (y.sum() + state.sum()).backward()
    assert all(torch.equal(inputs[name], copies[name]) for name in copies)


@pytest.mark.parametrize("scan", [scan for scan in SCANS if scan is not TRAPEZOID], ids=lambda scan: scan.name)
def test_results_keep_the_dtype_of_inputs_and_state(scan: Scan) -> None:
    inputs = scan.make_inputs(9, dtype=torch.float32)
    low = {name: inputs[name].bfloat16() for name in scan.low}
    y, state = scan.scan(**(inputs | low))
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = scan.reference(**(inputs | single(low)))
    assert torch.equal(y, exact.bfloat16()) or (y - exact).abs().max() < 0.02 * exact.abs().max()


@every_scan
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_does_not_touch_the_recurrence(scan: Scan, backward_inside: bool, length: int) -> None:
    inputs = {name: value.requires_grad_() for name, value in scan.make_inputs(length, dtype=torch.float32).items()}
    y, state = scan.scan(**inputs)
    expected = torch.autograd.grad(y.sum() + state.sum(), list(inputs.values()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_autocast, state = scan.scan(**inputs)
        loss = y_autocast.sum() + state.sum()
        if backward_inside:
            gradients = torch.autograd.grad(loss, list(inputs.values()))
    if not backward_inside:
        gradients = torch.autograd.grad(loss, list(inputs.values()))
    assert torch.equal(y, y_autocast)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.gpu
@every_scan
@every_length
def test_the_chunked_form_equals_the_definition_on_a_gpu(scan: Scan, length: int) -> None:
    inputs = {name: value.cuda() for name, value in scan.make_inputs(length).items()}
    expected = {name: value.cuda() for name, value in truth(scan, length).items()}
    assert_equal_up_to(1e-11, run(scan, scan.scan, inputs), expected)
