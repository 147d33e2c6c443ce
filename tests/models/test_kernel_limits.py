"""What the GPU kernels cannot take is kept from them: layouts, sizes beyond 32-bit addresses, configurations.

Where packages are not installed, `use_kernels=True` takes kernels from the Hub; loops from the definitions stand in.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from hf_recurrent_lengthgen.models import layers_conv as conv_module
from hf_recurrent_lengthgen.models import (
    modeling_stateful_mamba,
    scan_delta,
    scan_fla_kernels,
    scan_gla,
    scan_hub_kernels,
    scan_rwkv6,
    scan_selective,
    scan_trapezoid,
)
from hf_recurrent_lengthgen.models import scan_ssd as scan_module
from hf_recurrent_lengthgen.models.layers_conv import causal_conv
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.scan_backends import resolve_backend
from hf_recurrent_lengthgen.models.scan_hub_kernels import HUB_KERNELS, hub_kernel
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd

from .families import GATED_DELTANET, GLA, MAMBA, MAMBA2, RWKV7, Family, build, random_tokens, variant_id
from .law import assert_equal_up_to
from .scan_definitions import scan_gla_reference, scan_selective_reference, scan_ssd_reference
from .scans import DPLR, RWKV6, TRAPEZOID, Scan
from .scans import GLA as GLA_SCAN
from .test_scans import run

CHANNELS, TAPS = 16, 4


@pytest.fixture
def conv_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A stand-in that refuses what causal-conv1d 1.7 refuses; the shapes of its inputs."""
    calls: list[tuple[int, ...]] = []

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor, activation: str) -> Tensor:
        assert x.stride(1) == 1 < x.stride(2), "initial states need the channel-last layout"
        numbers = (x.shape[1], x.stride(0), x.stride(2), x.storage_offset())
        assert not any(number % 8 for number in numbers), "vectors of 16 bytes"
        assert 2 <= weight.shape[1] <= 4
        assert bias is None or bias.dtype == weight.dtype
        assert initial_states.dtype == x.dtype
        assert initial_states.shape == (x.shape[0], x.shape[1], weight.shape[1] - 1)
        assert initial_states.stride(1) == 1
        calls.append(tuple(x.shape))
        return causal_conv(x.mT, weight, bias, initial_states)[0].mT

    monkeypatch.setattr(conv_module, "causal_conv1d_fn", kernel)
    return calls


def conv_results(x: Tensor, backend: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(CHANNELS, TAPS), (CHANNELS,), (x.shape[0], CHANNELS, TAPS - 1)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    y, state = causal_conv(x, *leaves, backend=backend)  # type: ignore[arg-type]
    objective = (y.float() * torch.randn(y.shape, generator=generator)).sum() + state.square().sum()
    return [y, state, *torch.autograd.grad(objective, [x, *leaves])]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 1), (1, 2), (2, 9)])
@pytest.mark.parametrize(("before", "after"), [(8, 8), (8, 3), (4, 4), (0, 1)], ids=str)
def test_a_slice_of_any_projection_reaches_the_convolution_kernel_as_it_needs_it(
    batch: int, length: int, before: int, after: int, dtype: torch.dtype, conv_calls: list[tuple[int, ...]]
) -> None:
    projection = torch.randn(batch, length, before + CHANNELS + after, generator=torch.Generator().manual_seed(0))
    x = projection.to(dtype).requires_grad_()[..., before : before + CHANNELS]
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # the kernel takes a state in the dtype of x
    assert_same(conv_results(x, "kernel"), conv_results(x, "torch"), tolerance)
    assert conv_calls == [(batch, CHANNELS, length)] * (length > 1)  # one token needs no kernel


def test_large_inputs_go_through_the_convolution_kernel_in_halves(
    conv_calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_module, "_KERNEL_MAX_ELEMENTS", 10 * CHANNELS)
    x = torch.randn(3, 15, CHANNELS, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert_same(conv_results(x, "kernel"), conv_results(x, "torch"))
    assert conv_calls == 3 * [(1, CHANNELS, 7), (1, CHANNELS, 8)]


@pytest.mark.parametrize(
    ("limits", "rows", "tokens"),
    [
        ({}, 5, 40),
        ({"_KERNEL_MAX_TOKENS": 16}, 5, 16),
        ({"_KERNEL_MAX_CHUNKS": 6}, 2, 40),  # 3 chunks of 16 in each row
        ({"_KERNEL_MAX_ELEMENTS": 3 * 32 * 16 * 2}, 2, 40),  # G * Q * Q = 512 in each of 3 chunks
        ({"_KERNEL_MAX_ELEMENTS": 100}, 1, 16),  # a state is H * P * N = 96
    ],
)
def test_large_inputs_go_through_the_scan_kernel_in_rows_and_chunks(
    limits: dict[str, int], rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def kernel(x, dt, A, B, C, chunk_size, D, initial_states, return_final_states):  # type: ignore[no-untyped-def]
        calls.append((len(x), x.shape[1], chunk_size))
        return scan_ssd_reference(x, dt, A, B, C, D, initial_states)

    monkeypatch.setattr(scan_module, "mamba_chunk_scan_combined", kernel)
    for name, value in limits.items():
        monkeypatch.setattr(scan_module, name, value)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 40, 4, 3), (5, 40, 4), (4,), (5, 40, 2, 8), (5, 40, 2, 8), (4,), (5, 4, 3, 8)]
    x, dt, A, *rest = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    arguments = (x, dt.abs(), -A.abs(), *rest)
    y, state = scan_ssd(*arguments, chunk_size=9, backend="kernel")
    expected_y, expected_state = scan_ssd_reference(*arguments)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(state, expected_state)
    assert calls[0] == (rows, tokens, 16)  # the next power of two
    assert sum(count * length for count, length, _ in calls) == 5 * 40


def limits_of(family: Family, dtype: torch.dtype = torch.float32, **sizes: Any) -> list[str]:
    with torch.device("meta"):
        layers = family.causal_lm_class(family.config(**sizes)).base_model.layers
    return [layer.scan_mixer.kernel_limit(dtype) for layer in layers]


WIDE, TAPS_5 = "keys of at most 256 dimensions, got 512", "a convolution of 2, 3 or 4 taps, got 5"
DTYPE = "float32, float16 or bfloat16, got torch.float64"


@pytest.mark.parametrize(
    ("family", "sizes", "dtype", "expected"),
    [
        (MAMBA, {}, torch.float32, ["", ""]),
        (MAMBA, {}, torch.bfloat16, ["", ""]),
        (MAMBA, {}, torch.float64, [DTYPE] * 2),
        (MAMBA, {"conv_kernel": 5}, torch.float32, [TAPS_5] * 2),
        (MAMBA, {"hidden_size": 10}, torch.float32, ["convolved channels to be a multiple of 8, got 20"] * 2),
        (MAMBA, {"layer_state_sizes": [5, 300]}, torch.float32, ["", "a state_size of at most 256, got 300"]),
        (MAMBA2, {"state_size": 8}, torch.float16, ["", ""]),
        (MAMBA2, {"state_size": 8, "conv_kernel": 5}, torch.float32, [TAPS_5] * 2),
        (
            MAMBA2,
            {"layer_state_sizes": [8, 5]},
            torch.float32,
            ["", "convolved channels to be a multiple of 8, got 52"],
        ),
        # fla's kernels take 256; heads that StateX merges may have more
        (
            GATED_DELTANET,
            {"num_heads": 2, "head_dim": 256, "layer_num_heads": [2, 1]},
            torch.float32,
            ["", WIDE],
        ),
        (RWKV7, {"hidden_size": 512, "head_dim": 256, "layer_num_heads": [2, 1]}, torch.float32, ["", WIDE]),
    ],
    ids=variant_id,
)
def test_what_the_kernels_cannot_run_is_named(
    family: Family, sizes: dict[str, Any], dtype: torch.dtype, expected: list[str]
) -> None:
    assert limits_of(family, dtype, **sizes) == expected


def test_auto_takes_torch_and_kernel_refuses_what_the_kernels_cannot_run() -> None:
    for setting, device, available, limit, backend in (
        ("auto", "cuda", True, "", "kernel"),
        ("kernel", "cuda", True, "", "kernel"),
        ("torch", "cuda", True, "", "torch"),
        ("auto", "cuda", True, DTYPE, "torch"),
        ("auto", "cpu", True, "", "torch"),
        ("auto", "cuda", False, "", "torch"),
    ):
        assert resolve_backend(setting, device, available, limit) == backend
    for device, available, limit, message in (
        ("cuda", True, DTYPE, f"the kernels need {DTYPE}"),
        ("cpu", True, "", "the kernels need a CUDA device, the inputs are on 'cpu'"),
        ("cuda", False, "", r"to be installed \(pip install"),
    ):
        with pytest.raises(ValueError, match=f'scan_backend="kernel": .*{message}'):
            resolve_backend("kernel", device, available, limit)


CALLS: list[str] = []


def conv(x: Tensor, weight: Tensor, bias: Any, initial_states: Tensor, activation: str | None) -> Tensor:
    CALLS.append("conv")
    y = conv1d(torch.cat([initial_states, x], 2), weight[:, None], bias, groups=len(weight))
    return silu(y) if activation else y


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any, **keyword: Any) -> Any:
    CALLS.append("scan")
    return scan_ssd_reference(x, dt, A, B, C, D, keyword["initial_states"])


def selective(*inputs: Any, softplus: bool) -> Any:
    CALLS.append("scan")
    x, raw, A, B, C, D, state, gate = inputs
    y, state = scan_selective_reference(x, torch.nn.functional.softplus(raw), A, B, C, D, state)
    return y * silu(gate), state


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, **_: Any) -> Any:
    CALLS.append("scan")
    y, state = scan_gla_reference(q, k, v, g, initial_state.mT)
    return y * scale, state.mT


MODULES = {
    "causal-conv1d": {"causal_conv1d_fn": conv},
    "mamba-ssm": {"mamba_chunk_scan_combined": ssd},
    "fla": {"ops": SimpleNamespace(gla=SimpleNamespace(chunk_gla=gla))},
}
INSTALLED = {
    conv_module: "causal_conv1d_fn",
    scan_module: "mamba_chunk_scan_combined",
    scan_gla: "chunk_gla",
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No package is installed, a CPU counts as a GPU; what is said."""
    warnings: dict[str, None] = {}
    for module, name in INSTALLED.items():
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(PreTrainedModel, "set_use_kernels", lambda model, use, *rest: None)  # it needs `kernels`
    monkeypatch.setattr(ScanMixer, "backend_for", lambda mixer, x: "kernel" if mixer.kernel_available else "torch")
    monkeypatch.setattr(
        scan_hub_kernels, "logger", SimpleNamespace(warning_once=warnings.setdefault, info=lambda text: None)
    )
    hub_kernel.cache_clear()
    CALLS.clear()
    yield warnings
    hub_kernel.cache_clear()


def logits(family: Family, folder: Path, **options: Any) -> Tensor:
    model = family.causal_lm_class.from_pretrained(folder, **options)
    with torch.no_grad():
        return model(random_tokens(2, 9)).logits


def hub(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """The stand-ins are on the Hub; what is taken from there."""
    requested: set[tuple[str, int]] = set()

    def get_kernel(kernel_name: str, version: int) -> ModuleType:
        owner, _, name = kernel_name.partition("/")
        assert owner == "kernels-community"
        requested.add((name, version))
        module = ModuleType(name)
        vars(module).update(MODULES[name])
        return module

    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)  # false also where `kernels` is missing
    return requested


@pytest.mark.parametrize(
    ("family", "repositories"),
    [
        (MAMBA2, [("causal-conv1d", 1), ("mamba-ssm", 2)]),
        (GLA, [("fla", 1)]),
    ],
    ids=["mamba2", "gla"],
)
def test_scans_take_the_kernels_of_the_hub(
    family: Family, repositories: list[Any], said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = hub(monkeypatch)
    build(family).save_pretrained(tmp_path)
    expected = logits(family, tmp_path)
    assert not requested
    assert not CALLS
    torch.testing.assert_close(logits(family, tmp_path, use_kernels=True), expected, rtol=1e-4, atol=1e-5)
    assert sorted(requested) == repositories
    assert set(CALLS) == ({"scan"} if family is GLA else {"scan", "conv"})
    assert not said


def test_mamba_needs_triton_only_and_takes_the_convolution_of_the_hub(
    said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = hub(monkeypatch)
    warned: dict[str, None] = {}
    monkeypatch.setattr(conv_module, "logger", SimpleNamespace(warning_once=warned.setdefault))
    for module in (scan_selective, modeling_stateful_mamba):
        monkeypatch.setattr(module, "selective_scan", None)
    monkeypatch.setattr(modeling_stateful_mamba, "KERNEL_AVAILABLE", False)
    build(MAMBA).save_pretrained(tmp_path)
    expected = logits(MAMBA, tmp_path, use_kernels=True)
    without = (
        "use_kernels: the scan of Mamba-1 needs Triton, which is not installed. What has no kernel runs in torch."
    )
    assert list(said) == [without]
    assert not CALLS
    for module in (scan_selective, modeling_stateful_mamba):
        monkeypatch.setattr(module, "selective_scan", selective)
    monkeypatch.setattr(modeling_stateful_mamba, "KERNEL_AVAILABLE", True)
    for options, calls in (({}, {"scan"}), ({"use_kernels": True}, {"scan", "conv"})):
        torch.testing.assert_close(logits(MAMBA, tmp_path, **options), expected, rtol=1e-4, atol=1e-5)
        assert set(CALLS) == calls
    assert requested == {("causal-conv1d", 1)}
    assert [text.split(":")[0] for text in warned] == ["Short convolutions run in torch, which takes time and memory"]
    assert list(said) == [without]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("no build\nfor this torch"), ImportError("einops"), AttributeError("_"), None]
)
def test_scans_stay_in_torch_with_one_sentence(
    error: Exception | None, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_kernel(kernel_name: str, version: int) -> ModuleType:
        assert error is not None, "USE_HUB_KERNELS=NO asks for nothing"
        raise error

    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", error is not None)
    build(MAMBA2).save_pretrained(tmp_path)
    expected = logits(MAMBA2, tmp_path)
    for _ in range(2):
        assert torch.equal(logits(MAMBA2, tmp_path, use_kernels=True), expected)
    why = "ValueError: USE_HUB_KERNELS is off" if error is None else f"{type(error).__name__}: {error}"
    why = why.replace("\n", " ")
    tried = f"kernels-community/mamba-ssm version 2 cannot be loaded ({why})"
    assert list(said) == [f"use_kernels: {tried}. What has no kernel runs in torch."]


def test_layers_take_functions_of_fla_from_the_release_that_has_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing without triton; nothing is imported."""
    installed = ["fla", "triton"]
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in installed else None)
    for file in ("ops/gla/chunk.py", "modules/l2norm.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    places = [("fla.ops.gla", "chunk_gla"), ("fla.modules.norm.l2norm", "l2norm")]
    assert [scan_fla_kernels.fla_kernel(*place) is None for place in places] == [False, True]
    (tmp_path / "modules/norm").mkdir()
    (tmp_path / "modules/norm/l2norm.py").touch()
    assert [scan_fla_kernels.fla_kernel(*place) is None for place in places] == [False, False]
    installed.remove("triton")
    assert [scan_fla_kernels.fla_kernel(*place) is None for place in places] == [True, True]


def test_every_name_is_one_that_a_scan_looks_up() -> None:
    """A kernel that is renamed in a scan must be renamed here, too."""
    modules = [*INSTALLED, scan_delta, scan_rwkv6, scan_trapezoid]
    assert all(any(hasattr(module, name) for module in modules) for name in HUB_KERNELS)


@pytest.mark.parametrize(
    ("capability", "triton", "refuses"),
    [
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.6.0+git1", True),
        ((9, 0), "3.7.1", False),
        ((9, 0), "3.10.0", False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_gates_of_heads_are_repeated_where_fla_refuses_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str, refuses: bool
) -> None:
    """fla 0.6 raises an error in the backward pass on Hopper with Triton 3.4 to 3.7.0, seen on an H200 with 3.6."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    shapes: list[tuple[int, ...]] = []

    def scan(kernel: Any, inputs: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(inputs[3].shape))
        return inputs[2], state

    def where() -> Any:
        return scan_fla_kernels.refuses_gates_of_heads(torch.device("cuda"))

    for module in (scan_delta, scan_trapezoid):
        monkeypatch.setattr(module, "scan_with_fla", scan)
        monkeypatch.setattr(module, "refuses_gates_of_heads", lambda _: where())
    scan_fla_kernels._compiled_wrongly.cache_clear()
    keys, values, state, numbers = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 5), torch.ones(1, 2, 5, 4), (1, 3, 2)
    delta: Any = (keys, keys, values, torch.ones(1, 3, 2, 1), torch.ones(numbers))
    past = [torch.cat([part[:, :1], part], 1) for part in (values, keys)]
    trapezoid: Any = (*(torch.ones(numbers) for _ in range(3)), torch.ones(1, 3, 1), *past, keys, torch.ones(2))
    try:
        scan_delta._delta_with_kernel(delta, state, 0)
        scan_trapezoid._scan_with_kernel(trapezoid, state, 0)
        expected = keys.shape if refuses else numbers
        assert shapes == [tuple(expected)] * 2
        with torch.no_grad():  # what is refused is the backward pass
            assert not where()
    finally:
        scan_fla_kernels._compiled_wrongly.cache_clear()


@pytest.mark.parametrize("scan", [GLA_SCAN, RWKV6], ids=lambda scan: scan.name)
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
def test_large_inputs_go_through_the_kernels_of_fla_in_rows_and_chunks(
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

    monkeypatch.setattr(scan_gla if scan is GLA_SCAN else scan_rwkv6, scan.kernel, kernel)
    for name, value in limits.items():
        monkeypatch.setattr(scan_fla_kernels, name, value)
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

    monkeypatch.setattr(scan_delta, DPLR.kernel, kernel)
    inputs = DPLR.make_inputs(65)
    states, five = inputs["initial_state"][0].numel(), 2 * 5 * 16 * 4 * 5  # of both rows, five chunks
    expected = run(DPLR, DPLR.reference, inputs)
    for elements, chunks in ((five, [(2, 65)]), (five - 1, [(1, 65)] * 2), (states, [*[(1, 16)] * 4, (1, 1)] * 2)):
        monkeypatch.setattr(scan_fla_kernels, "_KERNEL_MAX_ELEMENTS", elements)
        assert_equal_up_to(1e-12, run(DPLR, DPLR.scan, inputs, backend="kernel"), expected)
        assert seen == chunks
        seen.clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_kernel_gets_turned_keys_and_scaled_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's `chunk_simple_gla`, whose states are (B, H, N, P) and gates (B, T, H), played by the definition of GLA."""
    inputs = TRAPEZOID.make_inputs(20)

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, **_: Any) -> Any:
        assert (q.dtype, k.dtype, v.dtype, scale) == (dtype, dtype, dtype, 1.0)
        assert g.shape == q.shape[:3]
        y, state = scan_gla_reference(*(t.double() for t in (q, k, v)), g[..., None].expand_as(q), initial_state.mT)
        return y, state.mT

    monkeypatch.setattr(scan_trapezoid, "chunk_simple_gla", kernel)
    low = {name: inputs[name].to(dtype) for name in ("x", "B", "C")}
    found = run(TRAPEZOID, TRAPEZOID.scan, inputs | low, backend="kernel")
    widened = {name: value.to(torch.float64) for name, value in low.items()}
    expected = run(TRAPEZOID, TRAPEZOID.scan, inputs | widened)
    assert found["y"].dtype == torch.float64
    found |= {name: value.double() for name, value in found.items()}
    assert_equal_up_to(1e-12 if dtype == torch.float64 else 0.03, found, expected)
