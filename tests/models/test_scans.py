"""Every scan against its definition: outputs, final state, every gradient, any length, any split, any decay."""

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from hf_recurrent_lengthgen.models import scan_decays
from hf_recurrent_lengthgen.models import scan_selective as selective_module
from hf_recurrent_lengthgen.models.scan_selective import scan_selective

from .law import assert_equal_up_to
from .scans import DELTA, GLA, RWKV6, SCANS, SELECTIVE, TRAPEZOID, Inputs, N, Scan

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
        chunk = {name: leaves[name][:, start:stop] for name in scan.over_time}
        chunk |= {name: leaves[name][:, start : stop + 1] for name in scan.before}
        y, state = function(**(carried | chunk), **options)  # type: ignore[operator]
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


@pytest.mark.thinned(5)
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


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rate", [0.0, 1e3, 1e8], ids="rate {:g}".format)
@every_scan
def test_any_decay_is_exact_in_float32(scan: Scan, rate: float) -> None:
    """From keeping everything to erasing it at each token."""
    inputs = single(scan.make_inputs(130, rate=rate))
    if scan in DELTA and rate == 0:
        inputs |= {"k": inputs["k"] * 0.5}  # else a state of RWKV-7 grows
    exact = run(scan, scan.reference, {name: value.double() for name, value in inputs.items()})
    actual = {name: value.double() for name, value in run(scan, scan.scan, inputs).items()}
    for name, value in exact.items():
        assert (actual[name] - value).norm() <= 1e-5 * value.norm() + 1e-20, name


# --- what only some scans have ---


@pytest.mark.parametrize("scan", [GLA, RWKV6, *DELTA], ids=lambda scan: scan.name)
def test_many_chunks_at_once_and_one_by_one_are_the_same(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = scan.make_inputs(200)
    monkeypatch.setattr(scan_decays, "_TOGETHER", 3 * 8 * 4 * 5 * 2)  # three chunks of eight
    few = run(scan, scan.scan, inputs, chunk_size=8)
    monkeypatch.setattr(scan_decays, "_TOGETHER", 1)
    assert_equal_up_to(1e-14, few, run(scan, scan.scan, inputs, chunk_size=8))
    assert_equal_up_to(1e-12, few, run(scan, scan.reference, inputs))


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("scan", DELTA[:2], ids=lambda scan: scan.name)
def test_heads_may_share_queries_and_keys(scan: Scan, length: int) -> None:
    """The same as with a copy for each head, whose gradients are summed."""
    inputs = scan.make_inputs(length)
    shared = inputs | {name: inputs[name][:, :, :2] for name in "qk"}
    copied = shared | {name: shared[name][:, :, [0, 0, 1, 1]] for name in "qk"}
    expected = run(scan, scan.reference, copied)
    for name in ("q", "k"):
        expected[f"gradient of {name}"] = expected[f"gradient of {name}"].unflatten(2, (2, 2)).sum(3)
    assert_equal_up_to(1e-12, run(scan, scan.scan, shared), expected)


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


@pytest.mark.thinned(3)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("scan", DELTA[:2], ids=lambda scan: scan.name)
def test_extremes_of_the_delta_rule_in_float32(scan: Scan, extreme: str) -> None:
    inputs = scan.make_inputs(200)
    inputs |= EXTREMES[extreme](inputs)
    exact, actual = run(scan, scan.reference, inputs), run(scan, scan.scan, single(inputs))
    assert_equal_up_to(1e-5, {name: value.double() for name, value in actual.items()}, exact)
    assert_equal_up_to(1e-11, run(scan, scan.scan, inputs), exact)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [16, 128])
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


@pytest.mark.parametrize("elements", [1, 5, 10, 40, 41, 2**16], ids="{} elements".format)
@pytest.mark.parametrize("length", [1, 16, 33])
def test_blocks_of_rows_and_channels_do_not_change_the_result(
    length: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selective_module, "_BLOCK_ELEMENTS", elements)
    inputs = SELECTIVE.make_inputs(length)
    assert_equal_up_to(1e-13, run(SELECTIVE, scan_selective, inputs), truth(SELECTIVE, length))


def test_memory_for_the_backward_pass_is_one_state_per_chunk() -> None:
    inputs = {name: value.requires_grad_() for name, value in SELECTIVE.make_inputs(64).items()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {value.untyped_storage().data_ptr() for value in inputs.values()}
    for chunk_size in (8, 16):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = scan_selective(**inputs, chunk_size=chunk_size)
        extra = sum(size for address, size in kept.items() if address not in own)
        assert extra == 64 // chunk_size * inputs["initial_state"].nbytes
        assert all(result.requires_grad for result in results)


def test_a_copy_of_the_file_has_operators_of_its_own() -> None:
    """As when a checkpoint brings its code: neither copy takes the operators of the other."""
    source = Path(selective_module.__file__)
    package = types.ModuleType("stranger")
    package.__path__ = [str(source.parent)]
    sys.modules["stranger"] = package
    try:
        spec = importlib.util.spec_from_file_location("stranger.scan_selective", source)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        inputs = SELECTIVE.make_inputs(5)
        expected = run(SELECTIVE, scan_selective, inputs)
        assert_equal_up_to(0, run(SELECTIVE, copy.scan_selective, inputs), expected)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "stranger"]:
            del sys.modules[name]


def by_single_entries(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """arXiv:2603.15569 with its own frame by single entries: keys and queries are turned by all angles so far."""
    outputs, finals = torch.zeros_like(x[:, 1:]), torch.zeros_like(initial_state)
    for b in range(len(x)):
        for h in range(x.shape[2]):
            S, angle = initial_state[b, h], torch.zeros(2, dtype=dt.dtype)
            before = torch.outer(x[b, 0, h], B[b, 0, h])
            for t in range(dt.shape[1]):
                alpha, step, now = g[b, t, h].exp(), dt[b, t, h], share[b, t, h]
                angle = angle + step * w[b, t]
                R = torch.eye(N, dtype=dt.dtype)
                for i in range(2):
                    cos, sin = angle[i].cos(), angle[i].sin()
                    R[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.stack([cos, -sin, sin, cos]).view(2, 2)
                written = torch.outer(x[b, t + 1, h], R @ B[b, t + 1, h])
                S = alpha * S + (1 - now) * step * alpha * before + now * step * written
                before = written
                outputs[b, t, h] = S @ (R @ C[b, t, h]) + D[h] * x[b, t + 1, h]
            finals[b, h] = S @ R  # R^T turns back
    return outputs, finals


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_definition_of_mamba3_is_the_equation(length: int) -> None:
    inputs = TRAPEZOID.make_inputs(length)
    assert_equal_up_to(1e-12, truth(TRAPEZOID, length), run(TRAPEZOID, by_single_entries, inputs))


def test_all_keys_may_turn() -> None:
    inputs = TRAPEZOID.make_inputs(20)
    inputs |= {name: inputs[name][..., :4] for name in ("B", "C", "initial_state")}
    assert_equal_up_to(1e-12, run(TRAPEZOID, TRAPEZOID.scan, inputs), run(TRAPEZOID, TRAPEZOID.reference, inputs))


@torch.no_grad()
def test_angles_keep_their_precision_over_thousands_of_turns() -> None:
    """In float32, a sum of 2,000 angles of up to 30 has lost three digits; decays are weak."""
    inputs = TRAPEZOID.make_inputs(2_000)
    inputs |= {"g": 1e-3 * inputs["g"], "w": inputs["w"].abs() * 20}
    rounded = {name: value.float() for name, value in inputs.items()}
    exact = TRAPEZOID.reference(**{name: value.double() for name, value in rounded.items()})
    for found, expected in zip(TRAPEZOID.scan(**rounded), exact, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_later_tokens_have_no_influence_at_all() -> None:
    """Not even of rounding, which Adam would make steps of."""
    inputs = {name: value.requires_grad_() for name, value in TRAPEZOID.make_inputs(70, torch.float32).items()}
    gradients = torch.autograd.grad(TRAPEZOID.scan(**inputs)[0][:, :40].sum(), list(inputs.values()))
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        if value.ndim > 1 and value.shape[1] in (70, 71):
            later = 41 if name in ("x", "B") else 40
            assert not gradient[:, later:].any(), name
            assert gradient[:, later - 1].any(), name


@pytest.mark.gpu
@every_scan
@every_length
def test_the_chunked_form_equals_the_definition_on_a_gpu(scan: Scan, length: int) -> None:
    inputs = {name: value.cuda() for name, value in scan.make_inputs(length).items()}
    expected = {name: value.cuda() for name, value in truth(scan, length).items()}
    assert_equal_up_to(1e-11, run(scan, scan.scan, inputs), expected)
