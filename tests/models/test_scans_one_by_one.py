"""Scans one by one: single tokens by hand, decays that erase everything, kernels in pieces, extremes."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
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
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd

from .law import assert_equal_up_to
from .scan_definitions import scan_ssd_reference
from .scans import DELTA, DPLR, GLA, RWKV6, Inputs, Scan, gla_inputs, rwkv6_inputs, ssd_inputs
from .scans import ssd as ssd_scan
from .test_scans import run, single


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
