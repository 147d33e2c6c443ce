"""Every scan against its definition: outputs, final state, every gradient, any length, any split, any decay."""

import math
import sys
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from hf_recurrent_lengthgen.models import scan_decays
from hf_recurrent_lengthgen.models import scan_delta as delta_module
from hf_recurrent_lengthgen.models import scan_fla_kernels as fla_module
from hf_recurrent_lengthgen.models import scan_gla as gla_module
from hf_recurrent_lengthgen.models import scan_rwkv6 as rwkv6_module
from hf_recurrent_lengthgen.models import scan_ssd as ssd_module
from hf_recurrent_lengthgen.models.scan_delta import scan_delta, scan_dplr
from hf_recurrent_lengthgen.models.scan_gla import scan_gla
from hf_recurrent_lengthgen.models.scan_rwkv6 import scan_rwkv6
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd, scan_ssd_reference

from .law import assert_equal_up_to
from .scans import DELTA, DPLR, GLA, RWKV6, SCANS, Inputs, Scan, gla_inputs, rwkv6_inputs, ssd_inputs
from .scans import ssd as ssd_scan

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
@every_length
def test_the_reference_is_the_equation(scan: Scan, length: int) -> None:
    length = min(length, 66)
    assert_equal_up_to(1e-12, truth(scan, length), run(scan, scan.loop, scan.make_inputs(length)))


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
@settings(max_examples=15)
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

    assert torch.autograd.gradcheck(function, leaves)


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
@every_scan
def test_gradients_of_decays_are_accurate_entry_by_entry(scan: Scan, pattern: str) -> None:
    """For rates from 1e-3 to 1e4, one for each head, and inputs of very different size from token to token.

    The gradient of a decay may be 1e-20 of those of the inputs beside it, and must not be made of their rounding
    errors. All inputs are positive, so that it has no cancellation of its own; that of Mamba's step has, between
    what is written and the decay, and is compared with the larger of both.
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
    torch.testing.assert_close(gradient, weights @ decay.mT if scan in DELTA else decay * weights)


@every_scan
@pytest.mark.parametrize("length", [1, 70])
def test_the_arguments_are_not_changed(scan: Scan, length: int) -> None:
    inputs = scan.make_inputs(length)
    copies = {name: value.clone() for name, value in inputs.items()}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan.scan(**leaves)
    (y.sum() + state.sum()).backward()
    assert all(torch.equal(inputs[name], copies[name]) for name in copies)


@every_scan
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


@every_scan
def test_bad_settings_are_refused(scan: Scan) -> None:
    inputs = scan.make_inputs(3)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        scan.scan(**inputs, chunk_size=0)
    with pytest.raises(ValueError, match=r'backend must be "torch" or "kernel", got \'auto\''):
        scan.scan(**inputs, backend="auto")


@every_scan
def test_the_kernel_is_refused_by_name_where_it_is_not_installed(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[scan.scan.__module__], scan.kernel, None)
    with pytest.raises(ValueError, match=rf'needs {scan.package} .* pip install "hf_recurrent_lengthgen\[kernels\]"'):
        scan.scan(**scan.make_inputs(3), backend="kernel")


@pytest.mark.gpu
@every_scan
@every_length
def test_the_chunked_form_equals_the_definition_on_a_gpu(scan: Scan, length: int) -> None:
    inputs = {name: value.cuda() for name, value in scan.make_inputs(length).items()}
    expected = {name: value.cuda() for name, value in truth(scan, length).items()}
    assert_equal_up_to(1e-11, run(scan, scan.scan, inputs), expected)


# torch.compile runs into deprecation warnings of torch itself, and looks at .grad of the pieces it is given
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    # the delta rule takes a hundred seconds at a symbolic length; whole models of it are compiled at one length
    "scan",
    [scan for scan in SCANS if scan not in DELTA and scan.name not in ("ssd-1-groups", "ssd-4-groups")],
    ids=lambda scan: scan.name,
)
def test_a_compiled_scan_is_one_graph_at_every_length(scan: Scan) -> None:
    """The second length makes torch.compile try a symbolic one, which must not take minutes."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda **inputs: scan.scan(**inputs, chunk_size=8), fullgraph=True, backend="aot_eager")
    for length in (20, 13):
        inputs = scan.make_inputs(length)
        expected = run(scan, scan.scan, inputs, chunk_size=8)
        assert_equal_up_to(1e-12, run(scan, compiled, inputs), expected)


# --- Mamba-2 ---


def test_one_token_of_ssd_by_hand() -> None:
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


@pytest.mark.parametrize("rate", [100.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decays_of_ssd_that_erase_everything_are_exact_and_finite(rate: float, dtype: torch.dtype) -> None:
    """exp(dt A) underflows for every token: y_t = (dt_t C_t . B_t + D) x_t, and nothing of the past is left."""
    inputs = ssd_inputs(130, dtype=dtype, rate=rate)
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


def test_long_inputs_go_through_the_ssd_kernel_in_pieces_with_the_state_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in with the kernel's interface counts the pieces; results equal one scan of everything."""
    lengths = []

    def kernel(x, dt, A, B, C, chunk_size, D, initial_states, return_final_states):  # type: ignore[no-untyped-def]
        assert return_final_states
        lengths.append(x.shape[1])
        return scan_ssd_reference(x, dt, A, B, C, D, initial_states)

    monkeypatch.setattr(ssd_module, "mamba_chunk_scan_combined", kernel)
    monkeypatch.setattr(ssd_module, "_KERNEL_MAX_TOKENS", 30)
    inputs, scan = ssd_inputs(65), ssd_scan(2)
    assert_equal_up_to(1e-12, run(scan, scan_ssd, inputs, backend="kernel"), run(scan, scan_ssd_reference, inputs))
    assert lengths == [30, 30, 5]


# --- GLA and RWKV-6 ---


def ones(**values: float) -> Inputs:
    return {name: torch.full((1, 1) if name == "u" else (1, 1, 1, 1), float(value)) for name, value in values.items()}


def test_one_token_of_gla_by_hand() -> None:
    """S = 3 / e + 4 * 5 and y = 7 S: the decay of a token acts before it is read."""
    y, state = scan_gla(**ones(q=7, k=5, v=4, g=-1, initial_state=3))
    assert state.item() == pytest.approx(3 / math.e + 20)
    assert y.item() == pytest.approx(7 * (3 / math.e + 20))


def test_one_token_of_rwkv6_by_hand() -> None:
    """y = 7 (3 + 2 * 5 * 4) and S = 3 / e + 4 * 5: the decay of a token acts after it is read."""
    y, state = scan_rwkv6(**ones(r=7, k=5, v=4, w=-1, u=2, initial_state=3))
    assert y.item() == pytest.approx(7 * (3 + 40))
    assert state.item() == pytest.approx(3 / math.e + 20)


@pytest.mark.parametrize("gate", [-200.0, -1e3, -1e6, -math.inf])
def test_gates_of_gla_that_erase_everything_are_exact_and_finite(gate: float) -> None:
    """y_t = (q_t . k_t) v_t, and only q, k and v have gradients."""
    inputs = gla_inputs(130, dtype=torch.float32)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan_gla(**leaves)
    expected = (inputs["q"] * inputs["k"]).sum(-1, keepdim=True) * inputs["v"]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, inputs["v"][:, -1, :, :, None] * inputs["k"][:, -1, :, None])
    gradients = dict(zip(leaves, torch.autograd.grad(y.sum() + state.sum(), list(leaves.values())), strict=True))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert (gradients["initial_state"] == 0).all()
    assert (gradients["g"] == 0).all()
    torch.testing.assert_close(gradients["q"], inputs["k"] * inputs["v"].sum(-1, keepdim=True))


@pytest.mark.parametrize("gate", [-200.0, -1e3, -1e6, -math.inf])
def test_gates_of_rwkv6_that_erase_everything_are_exact_and_finite(gate: float) -> None:
    """y_t = (r_t . u k_t) v_t + (r_t . k_{t-1}) v_{t-1}: a state is read once before its decay."""
    inputs = rwkv6_inputs(130, dtype=torch.float32)
    inputs["w"] = torch.full_like(inputs["w"], gate)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan_rwkv6(**leaves)
    r, k, v, start = (inputs[name] for name in ("r", "k", "v", "initial_state"))
    expected = (r * k * inputs["u"]).sum(-1, keepdim=True) * v
    expected[:, 1:] += (r[:, 1:] * k[:, :-1]).sum(-1, keepdim=True) * v[:, :-1]
    expected[:, 0] += (start * r[:, 0, :, None]).sum(-1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state, v[:, -1, :, :, None] * k[:, -1, :, None])
    gradients = dict(zip(leaves, torch.autograd.grad(y.sum() + state.sum(), list(leaves.values())), strict=True))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert (gradients["w"] == 0).all()
    torch.testing.assert_close(gradients["initial_state"], r[:, 0, :, None].expand_as(start))


@pytest.mark.parametrize("scan", [GLA, RWKV6], ids=lambda scan: scan.name)
@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        ({}, [(2, 65)]),
        ({"_KERNEL_MAX_TOKENS": 30}, [(2, 30), (2, 30), (2, 5)]),
        ({"_KERNEL_MAX_HEADS": 4}, [(1, 65), (1, 65)]),
        ({"_KERNEL_MAX_ELEMENTS": 2 * 64 * 4 * 5}, [(1, 65), (1, 65)]),
        ({"_KERNEL_MAX_ELEMENTS": 100}, [(1, 64), (1, 1), (1, 64), (1, 1)]),
    ],
)
def test_large_inputs_go_through_the_kernels_of_fla_in_rows_and_pieces(
    scan: Scan, limits: dict[str, int], calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the kernel's interface and its states (B, H, N, P)."""
    seen = []

    def kernel(q, k, v, g, *u, scale, initial_state, output_final_state):  # type: ignore[no-untyped-def]
        assert scale == 1
        assert output_final_state
        assert initial_state.shape == (len(q), 4, 5, 3)
        seen.append(tuple(q.shape[:2]))
        y, state = scan.reference(q, k, v, g, *u, initial_state.mT)
        return y, state.mT

    monkeypatch.setattr(gla_module if scan is GLA else rwkv6_module, scan.kernel, kernel)
    for name, value in limits.items():
        monkeypatch.setattr(fla_module, name, value)
    inputs = scan.make_inputs(65)
    actual = run(scan, scan.scan, inputs, backend="kernel")
    assert seen == calls
    assert_equal_up_to(1e-12, actual, run(scan, scan.reference, inputs))


def test_the_kernel_of_rwkv7_keeps_a_state_for_each_16_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def kernel(q, k, v, a, b, g, scale, initial_state, output_final_state):  # type: ignore[no-untyped-def]
        seen.append(tuple(q.shape[:2]))
        y, state = DPLR.reference(q, k, v, g, a, b, initial_state.mT)
        return y, state.mT

    monkeypatch.setattr(delta_module, DPLR.kernel, kernel)
    inputs = DPLR.make_inputs(65)
    states, five = inputs["initial_state"][0].numel(), 2 * 5 * 16 * 4 * 5  # of both rows, five chunks
    expected = run(DPLR, DPLR.reference, inputs)
    for elements, pieces in ((five, [(2, 65)]), (five - 1, [(1, 65)] * 2), (states, [*[(1, 16)] * 4, (1, 1)] * 2)):
        monkeypatch.setattr(fla_module, "_KERNEL_MAX_ELEMENTS", elements)
        assert_equal_up_to(1e-12, run(DPLR, DPLR.scan, inputs, backend="kernel"), expected)
        assert seen == pieces
        seen.clear()


@pytest.mark.parametrize("scan", [GLA, RWKV6, *DELTA], ids=lambda scan: scan.name)
def test_many_chunks_at_once_and_one_by_one_are_the_same(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = scan.make_inputs(200)
    monkeypatch.setattr(scan_decays, "_TOGETHER", 3 * 8 * 4 * 5 * 2)  # three chunks of eight
    few = run(scan, scan.scan, inputs, chunk_size=8)
    monkeypatch.setattr(scan_decays, "_TOGETHER", 1)
    assert_equal_up_to(1e-14, few, run(scan, scan.scan, inputs, chunk_size=8))
    assert_equal_up_to(1e-12, few, run(scan, scan.reference, inputs))


def test_inputs_of_other_shapes_are_refused() -> None:
    inputs = gla_inputs(3)
    with pytest.raises(ValueError, match=r"one shape \(B, T, H, N\), .* got .*\(2, 3, 4, 1\)"):
        scan_gla(**(inputs | {"g": inputs["g"][..., :1]}))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("scan", DELTA, ids=lambda scan: scan.name)
def test_arguments_of_the_delta_rule_of_other_shapes_are_refused(scan: Scan, length: int) -> None:
    inputs = scan.make_inputs(length)
    cut = {name: value[..., 0] if name == "g" else value[..., :1] for name, value in inputs.items()}
    for name in inputs:
        with pytest.raises(ValueError, match=r"must have (one shape|the shape)"):
            scan.scan(**(inputs | {name: cut[name]}))


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("scan", DELTA[:2], ids=lambda scan: scan.name)
def test_heads_may_share_queries_and_keys(scan: Scan, length: int) -> None:
    """The same as with a copy for each head, whose gradients are summed."""
    inputs = scan.make_inputs(length)
    shared = inputs | {name: inputs[name][:, :, :2] for name in "qk"}
    copied = shared | {name: shared[name][:, :, [0, 0, 1, 1]] for name in "qk"}
    expected = run(scan, scan.loop, copied)
    for name in ("q", "k"):
        expected[f"gradient of {name}"] = expected[f"gradient of {name}"].unflatten(2, (2, 2)).sum(3)
    for function in (scan.scan, scan.reference):
        assert_equal_up_to(1e-12, run(scan, function, shared), expected)
    for groups in (0, 3):
        with pytest.raises(ValueError, match="where G divides H"):
            scan.scan(**(inputs | {name: inputs[name][:, :, :groups] for name in "qk"}))


def test_linear_attention_and_hgrn2_are_cases_of_gla() -> None:
    """Masked (q k^T) v without gates; an average of the values with k = 1 - f."""
    inputs = gla_inputs(20)
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    zero = torch.zeros_like(inputs["initial_state"])
    y, _ = scan_gla(**(inputs | {"g": torch.zeros_like(inputs["g"]), "initial_state": zero}))
    torch.testing.assert_close(y.transpose(1, 2), (q @ k.mT).tril() @ v)
    keys = 1 - inputs["g"].exp()
    _, state = scan_gla(**(inputs | {"k": keys, "v": torch.ones_like(inputs["v"]), "initial_state": zero + 1}))
    torch.testing.assert_close(state, zero + 1)


# --- the delta rule ---


def keyed(keys: Tensor, beta: float, **changes: Tensor) -> Inputs:
    """Values of ones and twos for keys (T, N) of one head, without decay, from a state of zeros."""
    T, N = keys.shape
    values = torch.arange(1.0, T + 1, dtype=torch.float64).view(1, T, 1, 1).expand(1, T, 1, 2)
    gates, rates = torch.zeros(1, T, 1, 1, dtype=torch.float64), torch.full((1, T, 1), beta, dtype=torch.float64)
    keys = keys.view(1, T, 1, N)
    state = torch.zeros(1, 1, 2, N, dtype=torch.float64)
    return {"q": keys, "k": keys, "v": values, "g": gates, "beta": rates, "initial_state": state} | changes


def orthonormal(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def test_one_token_of_the_delta_rule_by_hand() -> None:
    """What is read of the decayed state is 0.5 * 3 = 1.5; S = 1.5 + 0.8 (4 - 1.5) = 3.5 and y = 7 S."""
    one = ones(q=7, k=1, v=4, g=math.log(0.5), initial_state=3)
    y, state = scan_delta(**one, beta=torch.full((1, 1, 1), 0.8))
    assert (state.item(), y.item()) == pytest.approx((3.5, 24.5))


def test_one_token_of_the_low_rank_recurrence_by_hand() -> None:
    """What is read of the state before its decay is 2 * 3 = 6; S = 0.5 * 3 + 6 * 0.25 + 4 * 5 = 23 and y = 7 S."""
    y, state = scan_dplr(**ones(q=7, k=5, v=4, g=math.log(0.5), a=2, b=0.25, initial_state=3))
    assert (state.item(), y.item()) == pytest.approx((23, 161))


def test_a_rate_of_one_keeps_the_last_value_of_each_of_orthogonal_keys() -> None:
    order = torch.tensor([0, 1, 2, 1, 3, 0, 0, 2] * 20)
    keys = orthonormal(4)[order]
    _, state = scan_delta(**keyed(keys, 1.0))
    last = torch.tensor([float((order == key).nonzero().max() + 1) for key in range(4)], dtype=torch.float64)
    torch.testing.assert_close(state[0, 0] @ orthonormal(4).T, last.expand(2, 4), rtol=1e-12, atol=1e-11)


def test_a_rate_of_two_reflects_and_keeps_the_norm() -> None:
    inputs = DELTA[0].make_inputs(200)
    inputs |= {"beta": torch.full_like(inputs["beta"], 2.0)}
    inputs |= {name: torch.zeros_like(inputs[name]) for name in ("v", "g")}
    _, state = scan_delta(**inputs)
    torch.testing.assert_close(state.norm(dim=-1), inputs["initial_state"].norm(dim=-1), rtol=1e-12, atol=0)
    assert float((state - inputs["initial_state"]).abs().max()) > 0.1


@pytest.mark.parametrize("gate", [-200.0, -1e3, -math.inf])
@pytest.mark.parametrize("scalar", [True, False])
def test_gates_of_the_delta_rule_that_erase_everything_are_exact_and_finite(gate: float, scalar: bool) -> None:
    """y_t = beta_t (q_t . k_t) v_t."""
    inputs = DELTA[0 if scalar else 1].make_inputs(130, dtype=torch.float32)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    y, state = scan_delta(**leaves)
    expected = (inputs["beta"] * (inputs["q"] * inputs["k"]).sum(-1))[..., None] * inputs["v"]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    gradients = dict(zip(leaves, torch.autograd.grad(y.sum() + state.sum(), list(leaves.values())), strict=True))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert (gradients["initial_state"] == 0).all()
    assert (gradients["g"] == 0).all()


EXTREMES: dict[str, Callable[[Inputs], Inputs]] = {
    "no decay": lambda inputs: {"g": 0 * inputs["g"]},
    "decays near 0": lambda inputs: {"g": inputs["g"] - 20},
    "decays near 1": lambda inputs: {"g": 1e-6 * inputs["g"]},
    "rates of 1": lambda inputs: {"beta": torch.ones_like(inputs["beta"])},
    "rates of 2": lambda inputs: {"beta": 0 * inputs["beta"] + 2},
    "one key": lambda inputs: {"k": inputs["k"][:, :1].expand_as(inputs["k"])},
    "two keys by turns": lambda inputs: {"k": inputs["k"][:, torch.arange(inputs["k"].shape[1]) % 2]},
    "keys of norm 3": lambda inputs: {"k": 3 * inputs["k"], "g": inputs["g"] - 3},
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("scan", DELTA[:2], ids=lambda scan: scan.name)
def test_extremes_of_the_delta_rule_in_float32(scan: Scan, extreme: str) -> None:
    inputs = scan.make_inputs(200)
    inputs |= EXTREMES[extreme](inputs)
    exact, actual = run(scan, scan.reference, inputs), run(scan, scan.scan, single(inputs))
    assert_equal_up_to(1e-5, {name: value.double() for name, value in actual.items()}, exact)
    assert_equal_up_to(1e-11, run(scan, scan.scan, inputs), exact)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
def test_reflections_of_30_000_tokens_in_float32(keys: int) -> None:
    """Rates of 2 without decay: no error is ever forgotten. That of gates, which sums over the state, is larger."""
    scan = DELTA[0]
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = {name: normal(1, 30_000, 1, keys) for name in ("q", "k", "v")}
    inputs |= {"k": normalize(inputs["k"], dim=3), "g": torch.zeros(1, 30_000, 1, 1, dtype=torch.float64)}
    inputs |= {"beta": torch.full((1, 30_000, 1), 2.0, dtype=torch.float64), "initial_state": normal(1, 1, keys, keys)}
    rounded = single(inputs)  # norms of keys round, and the state grows or shrinks with them
    exact = run(scan, scan.scan, {name: value.double() for name, value in rounded.items()})
    actual = {name: value.double() for name, value in run(scan, scan.scan, rounded).items()}
    gates = "gradient of g"
    assert_equal_up_to(3e-5, {gates: actual.pop(gates)}, {gates: exact.pop(gates)})
    assert_equal_up_to(1e-5, actual, exact)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("scan", DELTA, ids=lambda scan: scan.name)
def test_errors_do_not_grow_over_30_000_tokens(scan: Scan, rate: float) -> None:
    """Without decay, a delta rule of rates below 2 contracts; a state of RWKV-7 grows with what is added."""
    inputs = scan.make_inputs(30_000, rate=rate, heads=2)
    if scan.name == "dplr" and rate < 1:
        inputs |= {"v": inputs["v"] * 1e-3}
    exact, actual = run(scan, scan.scan, inputs), run(scan, scan.scan, single(inputs))
    assert_equal_up_to(1e-5, {name: value.double() for name, value in actual.items()}, exact)
