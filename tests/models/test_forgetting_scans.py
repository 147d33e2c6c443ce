"""Scans that forget, against the sum of what the last r tokens wrote, computed anew for each token."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, with_forgetting
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd
from hf_recurrent_lengthgen.models.state_value import LayerState, WindowedLayerState

H, P, N = 4, 3, 5


class Case(NamedTuple):
    """Rates, skip weights, and random inputs C, B, x and (dt, 0) for Mamba-2, and what the equations make of them.

    Attributes:
        decays: (B, T, H, P, N), of each token.
        written: (B, T, H, P, N), by each token.
        read: From states after each token (B, T, H, P, N) to outputs (B, T, H, P).
    """

    A: Tensor
    D: Tensor
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    decays: Tensor
    written: Tensor
    read: Callable[[Tensor], Tensor]


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ssd(B: int, T: int, groups: int, rule: Forgetting, dtype: torch.dtype, strength: float) -> Case:
    x, dt = random(B, T, H, P, seed=0, dtype=dtype), strength * random(B, T, H, seed=1, dtype=dtype).abs()
    A, skip = -random(H, seed=2, dtype=dtype).abs(), random(H, seed=3, dtype=dtype)
    b, c = (random(B, T, groups, N, seed=seed, dtype=dtype) for seed in (4, 5))
    b_heads, c_heads = (t.repeat_interleave(H // groups, dim=2) for t in (b, c))
    decays = (rule.retention * torch.exp(dt * A))[..., None, None].expand(B, T, H, P, N)
    written = rule.insertion * torch.einsum("bth,bthp,bthn->bthpn", dt, x, b_heads)

    def read(after: Tensor) -> Tensor:
        return torch.einsum("bthpn,bthn->bthp", after, c_heads) + skip[:, None] * x

    inputs = c, b, x, torch.nn.functional.pad(dt, (0, 1))
    return Case(A, skip, inputs, decays, written, read)


def scanned(rule: Forgetting, case: Case, inputs: Iterable[Tensor], state: Any) -> tuple[Tensor, Any]:
    c, b, x, g = inputs
    return with_forgetting(rule, scan_ssd, (x, g[..., :-1], case.A, b, c, case.D), state)


every_case = pytest.mark.parametrize("groups", [1, 2])


def of_the_window(case: Case, r: int | None) -> tuple[Tensor, Tensor]:
    """States after each token, (B, T, H, P, N), each summed up anew from the last r tokens; and outputs."""
    decays, written = case.decays.double(), case.written.double()
    T = decays.shape[1]
    states = [torch.zeros_like(written[:, 0])]
    for t in range(T):
        state = torch.zeros_like(states[0])
        for i in range(0 if r is None else max(0, t - r + 1), t + 1):
            state = decays[:, i] * state + written[:, i]
        states.append(state)
    after = torch.stack(states[1:], dim=1)
    return after, case.read(after.to(case.decays))


def start(case: Case, rule: Forgetting) -> Any:
    _, k, v, g = case.inputs
    recurrent = torch.zeros_like(case.written[:, 0])
    empty = recurrent.new_zeros(len(recurrent), 0)
    if rule.window is None:
        return LayerState(recurrent, empty)
    features = sum(t[0, 0].numel() for t in (k, v, g))
    return WindowedLayerState(recurrent, empty, recurrent.new_zeros(len(recurrent), 1 + rule.window, features))


def in_chunks(case: Case, rule: Forgetting, cuts: list[int]) -> tuple[Tensor, Any]:
    state, outputs = start(case, rule), []
    T = case.inputs[0].shape[1]
    for begin, end in zip([0, *cuts], [*cuts, T], strict=True):
        y, state = scanned(rule, case, (t[:, begin:end] for t in case.inputs), state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.thinned(7)
@every_case
@pytest.mark.parametrize(
    "rule",
    [
        Forgetting(window=1),
        Forgetting(window=7),
        Forgetting(window=200),
        Forgetting(retention=0.9, insertion=0.75),
        Forgetting(retention=0.3),
        Forgetting(insertion=2.0),
        Forgetting(window=7, retention=0.95, insertion=0.75),
    ],
    ids=str,
)
def test_states_and_outputs_are_sums_over_the_window(groups: int, rule: Forgetting) -> None:
    case = ssd(2, 90, groups, rule, torch.float64, 0.5)
    states, outputs = of_the_window(case, rule.window)
    y, state = in_chunks(case, rule, [])
    assert error(y, outputs) < 1e-12
    assert error(state.recurrent, states[:, -1]) < 1e-12
    y, state = in_chunks(case, rule, [1, 2, 3, 10, 11, 30, 89])
    assert error(y, outputs) < 1e-12
    assert error(state.recurrent, states[:, -1]) < 1e-12


@pytest.mark.thinned(7)
@every_case
@settings(max_examples=15)
@given(st.data())
def test_any_split_gives_the_same(groups: int, data: Any) -> None:
    rule = Forgetting(window=data.draw(st.integers(1, 40)), retention=0.98)
    case = ssd(2, 60, groups, rule, torch.float64, 0.3)
    cuts = sorted(data.draw(st.sets(st.integers(1, 59), max_size=12)))
    whole, split = in_chunks(case, rule, []), in_chunks(case, rule, cuts)
    assert error(split[0], whole[0]) < 1e-12
    assert error(split[1].recurrent, whole[1].recurrent) < 1e-12
    assert torch.equal(split[1].window[:, 1:], whole[1].window[:, 1:])


@pytest.mark.thinned(7)
@every_case
@pytest.mark.parametrize("strength", [1e-6, 0.01, 3.0, 1e4])
def test_single_precision_is_enough_for_weak_and_strong_decays(groups: int, strength: float) -> None:
    rule = Forgetting(window=32)
    case = ssd(1, 150, groups, rule, torch.float32, strength)
    states, _ = of_the_window(case, 32)
    for cuts in ([], list(range(1, 150))):
        _, state = in_chunks(case, rule, cuts)
        # what has decayed below the smallest normal number may be lost
        assert float((state.recurrent - states[:, -1]).norm()) < 1e-5 * float(states[:, -1].norm()) + 1e-30


@pytest.mark.thinned(3)
@every_case
@pytest.mark.parametrize("strength", [1e-6, 0.3, 3.0, 1e4])
@pytest.mark.parametrize("retention", [1.0, 0.5])
def test_without_gradients_the_same_is_computed(groups: int, strength: float, retention: float) -> None:
    """Memory is shared there, and exponents end at that of the smallest normal number."""
    rule = Forgetting(window=32, retention=retention)
    case = ssd(2, 150, groups, rule, torch.float32, strength)
    for cuts in ([], [1, 2, 50, 97]):
        y, state = in_chunks(case, rule, cuts)
        with torch.no_grad():
            same, same_state = in_chunks(case, rule, cuts)
        assert error(same, y) < 1e-6
        assert float((same_state.recurrent - state.recurrent).norm()) < 1e-6 * float(state.recurrent.norm()) + 1e-30


@pytest.mark.thinned(4)
@every_case
@pytest.mark.parametrize("cuts", [[], list(range(1, 200)), list(range(7, 200, 7))], ids=["whole", "tokens", "sevens"])
def test_an_outlier_leaves_no_trace_once_it_has_left(groups: int, cuts: list[int]) -> None:
    rule = Forgetting(window=32)
    case = ssd(1, 200, groups, rule, torch.float32, 1e-4)
    clean, _ = of_the_window(case, 32)
    case.inputs[2][:, 60] *= 1e6  # of 1e6 float32 keeps nothing below 0.06
    case.inputs[2][:, 75] *= 1e4
    state = start(case, rule)
    for begin, end in zip([0, *cuts], [*cuts, 200], strict=True):
        _, state = scanned(rule, case, (t[:, begin:end] for t in case.inputs), state)
        if end >= 75 + 32 + 1:
            assert error(state.recurrent, clean[:, end - 1]) < 1e-4, end


@pytest.mark.thinned(3)
@every_case
@pytest.mark.parametrize("cuts", [list(range(1, 200)), list(range(7, 200, 7))], ids=["tokens", "sevens"])
def test_what_is_not_finite_leaves_with_the_window(groups: int, cuts: list[int]) -> None:
    case = ssd(1, 200, groups, Forgetting(window=32), torch.float32, 1e-2)
    case.inputs[2][:, 60] = torch.nan
    state = start(case, Forgetting(window=32))
    for begin, end in zip([0, *cuts], [*cuts, 200], strict=True):
        inputs = (t[:, begin:end] for t in case.inputs)
        y, state = scanned(Forgetting(window=32), case, inputs, state)
        if end <= 60 or begin > 60 + 32:
            assert bool(y.isfinite().all())
        if end <= 60 or end > 60 + 32:
            assert bool(state.recurrent.isfinite().all()), end


@pytest.mark.thinned(7)
@every_case
@pytest.mark.parametrize("rule", [Forgetting(window=32), Forgetting(window=32, retention=0.9)], ids=str)
@pytest.mark.parametrize("strength", [1e-3, 1.0, 100.0])
def test_gradients_of_decays_are_accurate_in_float32(groups: int, rule: Forgetting, strength: float) -> None:
    def gradients(dtype: torch.dtype) -> list[Tensor]:
        case = ssd(2, 90, groups, rule, torch.float32, strength)
        *others, g = (t.to(dtype) for t in case.inputs)
        A = case.A.to(dtype).requires_grad_()
        inputs = (*others, g.requires_grad_())
        case = case._replace(A=A, D=case.D.to(dtype), inputs=inputs, written=case.written.to(dtype))
        y, state = in_chunks(case, rule, [10, 11, 50])
        weights = random(*y.shape, seed=9, dtype=torch.float32).to(dtype)
        return list(torch.autograd.grad((y * weights).sum() + state.recurrent.sum(), [g, A]))

    for actual, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert error(actual, exact) < 1e-4


@every_case
def test_autocast_changes_nothing(groups: int) -> None:
    rule = Forgetting(window=16, retention=0.99, insertion=0.5)
    case, cuts = ssd(2, 60, groups, rule, torch.float32, 0.3), list(range(3, 60, 3))
    expected, state = in_chunks(case, rule, cuts)
    with torch.autocast("cpu", torch.bfloat16):
        found, same = in_chunks(case, rule, cuts)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(same, state, strict=True))


@every_case
def test_gradients_are_those_of_the_sums(groups: int) -> None:
    rule = Forgetting(window=5, retention=0.9, insertion=0.8)
    case = ssd(1, 14, groups, rule, torch.float64, 0.5)
    noise = torch.zeros(1, 14, 1, 1, dtype=torch.float64, requires_grad=True)
    q, k, v, g = case.inputs
    _, state = scanned(rule, case, (q, k, v * (1 + noise), g), start(case, rule))
    states, _ = of_the_window(case._replace(written=case.written * (1 + noise[..., None])), 5)
    found, expected = (torch.autograd.grad(x.square().sum(), noise)[0] for x in (state.recurrent, states[:, -1]))
    assert error(found, expected) < 1e-12


@every_case
def test_the_initial_state_is_not_changed(groups: int) -> None:
    rule = Forgetting(window=16)
    case = ssd(2, 40, groups, rule, torch.float32, 0.3)
    _, state = in_chunks(case, rule, [])
    copies = [part.clone() for part in state]
    scanned(rule, case, (t[:, :9] for t in case.inputs), state)
    assert all(torch.equal(part, copy) for part, copy in zip(state, copies, strict=True))


@every_case
@pytest.mark.slow
@torch.no_grad()
def test_a_window_of_thousands_of_tokens_in_a_long_stream(groups: int) -> None:
    rule, r = Forgetting(window=4096), 4096
    for strength in (1e-5, 1e-3):
        case = ssd(1, 20_000, groups, rule, torch.float32, strength)
        state, position = start(case, rule), 0
        sizes = torch.randint(1, 3000, (80,), generator=torch.Generator().manual_seed(0)).tolist()
        while position < 20_000:
            size = sizes.pop()
            chunk = slice(position, position + size)
            _, state = scanned(rule, case, (t[:, chunk] for t in case.inputs), state)
            position = min(position + size, 20_000)
            if size % 3:
                continue
            window = slice(max(0, position - r), position)
            expected = torch.zeros_like(case.written[:, 0]).double()
            for decay, written in zip(case.decays[0, window], case.written[0, window], strict=True):
                expected = decay.double() * expected + written.double()
            assert error(state.recurrent, expected) < 1e-5, position
