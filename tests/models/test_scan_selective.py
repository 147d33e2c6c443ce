"""What only the selective scan has, beside test_scans.py: blocks, an operator of its own, states as tokens."""

import importlib.util
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from hf_recurrent_lengthgen.models import scan_selective as scan_module
from hf_recurrent_lengthgen.models.modeling_stateful_mamba import StatefulMambaMixer
from hf_recurrent_lengthgen.models.scan_selective import scan_selective

from . import test_scans
from .family_mamba import mamba_config
from .law import assert_equal_up_to
from .scan_definitions import scan_selective_reference
from .scans import SELECTIVE, selective_inputs

run = partial(test_scans.run, SELECTIVE)


@pytest.mark.parametrize("elements", [1, 5, 10, 40, 41, 2**16], ids="{} elements".format)
@pytest.mark.parametrize("length", [1, 16, 33])
def test_blocks_of_rows_and_channels_do_not_change_the_result(
    length: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_module, "_BLOCK_ELEMENTS", elements)
    inputs = selective_inputs(length)
    assert_equal_up_to(1e-13, run(scan_selective, inputs), run(scan_selective_reference, inputs))


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e3, 1e8], ids="rate {:g}".format)
def test_float32_is_as_exact_as_the_definition_for_any_decay(rate: float) -> None:
    """From keeping everything to erasing it at each token, with both in one sequence."""
    inputs = {name: value.float() for name, value in selective_inputs(130, rate=rate).items()}
    inputs["dt"][:, ::3] = 0
    inputs["dt"][:, 1::7] = 20
    exact = run(scan_selective_reference, {name: value.double() for name, value in inputs.items()})
    single = {name: value.double() for name, value in run(scan_selective, inputs).items()}
    for name, value in exact.items():
        assert (single[name] - value).norm() <= 2e-6 * value.norm(), name


def test_erasure_and_standstill_by_hand() -> None:
    """dt = 0 keeps the state bit for bit; exp(-1e9) leaves dt B x and no gradient of what was before."""
    inputs = selective_inputs(20, torch.float32)
    _, state = scan_selective(**(inputs | {"dt": torch.zeros_like(inputs["dt"])}))
    assert torch.equal(state, inputs["initial_state"])
    gone = inputs | {"A": torch.full_like(inputs["A"], -1e9), "dt": inputs["dt"] + 1}
    last = (gone["dt"][:, -1] * gone["x"][:, -1])[..., None] * gone["B"][:, -1, None]
    results = run(scan_selective, gone)
    torch.testing.assert_close(results["final state"], last)
    assert not results["gradient of initial_state"].any()
    assert not results["gradient of A"].any()


def test_memory_for_the_backward_pass_is_one_state_per_chunk() -> None:
    inputs = {name: value.requires_grad_() for name, value in selective_inputs(64).items()}
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


def test_no_state_is_kept_where_no_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, plain = [], scan_module._loop

    def spy(*arguments: Any) -> Any:
        results = plain(*arguments)
        kept.append(len(results[2]))
        return results

    monkeypatch.setattr(scan_module, "_loop", spy)
    inputs = selective_inputs(20)
    y, state = scan_selective(**inputs)
    with torch.no_grad():
        again, _ = scan_selective(**{name: value.clone().requires_grad_() for name, value in inputs.items()})
    assert kept == [0, 0]
    expected = scan_selective_reference(**inputs)
    torch.testing.assert_close((y, state), expected)
    assert torch.equal(again, y)


def test_a_second_derivative_is_refused() -> None:
    inputs = {name: value.requires_grad_() for name, value in selective_inputs(3).items()}
    (gradient,) = torch.autograd.grad(scan_selective(**inputs)[0].sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gradients_flow_from_one_result_alone_and_to_one_input_alone() -> None:
    inputs = selective_inputs(20)
    for which in (0, 1):
        for name, value in inputs.items():
            if (name, which) in (("C", 1), ("D", 1)):
                continue  # the state knows nothing of them
            gradients = []
            for scan in (scan_selective, scan_selective_reference):
                leaf = value.clone().requires_grad_()
                gradients += torch.autograd.grad(scan(**(inputs | {name: leaf}))[which].sum(), leaf)  # type: ignore[operator]
            torch.testing.assert_close(*gradients)


# torch.compile runs into deprecation warnings of torch itself, and asks pieces of leaves for their gradients
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_a_compiled_scan_is_one_operator_for_any_length() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda **kw: scan_selective(**kw), fullgraph=True, dynamic=True, backend=count)
    for length in (30, 50, 400):
        inputs = selective_inputs(length)
        assert_equal_up_to(1e-13, run(compiled, inputs), run(scan_selective, inputs))
    assert len(graphs) == 1
    assert graphs[0] < 60


def test_a_copy_of_the_file_has_operators_of_its_own() -> None:
    """As when a checkpoint brings its code: neither copy takes the operators of the other."""
    source = Path(scan_module.__file__)
    package = types.ModuleType("stranger")
    package.__path__ = [str(source.parent)]
    sys.modules["stranger"] = package
    try:
        spec = importlib.util.spec_from_file_location("stranger.scan_selective", source)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        assert_equal_up_to(0, run(copy.scan_selective, selective_inputs(5)), run(scan_selective, selective_inputs(5)))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "stranger"]:
            del sys.modules[name]


def stand_in(calls: list[tuple[int, ...]]) -> Any:
    """The definition with mamba-ssm's `selective_scan_fn` layout: zero initial state, none returned."""

    def selective_scan_fn(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: None = None, delta_softplus: bool = False
    ) -> Tensor:
        """u, delta: (B, D, L); A: (D, N); B, C: (B, N, L)."""
        assert {t.dtype for t in (u, delta, A, B, C)} == {torch.float32}
        assert u.shape == delta.shape
        assert D is None
        calls.append(tuple(u.shape))
        delta = softplus(delta) if delta_softplus else delta
        h, y = torch.zeros_like(u[..., :1] * A), []
        for t in range(u.shape[2]):
            decay = (delta[..., t, None] * A).exp()
            h = decay * h + (delta[..., t] * u[..., t])[..., None] * B[:, None, :, t]
            y.append((h * C[:, None, :, t]).sum(-1))
        return torch.stack(y, -1)

    return selective_scan_fn


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e3, 1e6], ids="rate {:g}".format)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_states_pass_through_a_kernel_that_has_none_as_tokens(
    length: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(scan_module, "selective_scan_fn", stand_in(calls))
    inputs = {name: value.float() for name, value in selective_inputs(length, rate=rate).items()}
    inputs["dt"][:, 1::2] *= 1e-4
    exact = run(scan_selective_reference, {name: value.double() for name, value in inputs.items()})
    kernel = {name: value.double() for name, value in run(scan_selective, inputs, backend="kernel").items()}
    for name, value in exact.items():
        assert (kernel[name] - value).norm() <= max(2e-6, rate * 1e-11) * value.norm() + 1e-12, name
    assert calls == [(2, 8, length + 2 * 5)] * (length > 1)  # one token needs no kernel


def test_large_inputs_go_through_the_kernel_in_rows_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(scan_module, "selective_scan_fn", stand_in(calls))
    inputs = {name: value.float() for name, value in selective_inputs(25).items()}
    expected = run(scan_selective, inputs)
    for elements, shapes in (
        (8 * 35, [(1, 8, 35), (1, 8, 35)]),
        (8 * 20, 2 * [(1, 8, 20), (1, 8, 20), (1, 8, 15)]),
        (1, 50 * [(1, 8, 11)]),
    ):
        calls.clear()
        monkeypatch.setattr(scan_module, "_KERNEL_MAX_ELEMENTS", elements)
        assert_equal_up_to(1e-5, run(scan_selective, inputs, backend="kernel"), expected)
        assert calls == shapes


def test_the_kernel_gives_the_dtypes_of_its_inputs_and_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "selective_scan_fn", stand_in([]))
    inputs = {name: value.float() for name, value in selective_inputs(9).items()}
    low = inputs | {name: inputs[name].bfloat16() for name in ("x", "B", "C")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = scan_selective(**low, backend="kernel")
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert state.untyped_storage().nbytes() == state.nbytes
    exact, exact_state = scan_selective_reference(**{name: value.float() for name, value in low.items()})
    assert (y - exact).norm() < 4e-3 * exact.norm()
    torch.testing.assert_close(state, exact_state)


@pytest.mark.parametrize("extension", [None, object()], ids=["without extension", "with extension"])
def test_the_kernel_counts_as_installed_only_with_its_cuda_extension(
    extension: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = types.ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_cuda, interface.selective_scan_fn = extension, stand_in([])  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    name = f"{scan_module.__package__}.scan_selective_again"
    spec = importlib.util.spec_from_file_location(name, scan_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.selective_scan_fn is None) == (extension is None)


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({}, torch.float32, ""),
        ({}, torch.bfloat16, ""),
        ({"conv_kernel": 5}, torch.float32, "a convolution of 2, 3 or 4 taps, got 5"),
        ({"hidden_size": 10}, torch.float32, "convolved channels to be a multiple of 8, got 20"),
        ({"state_size": 300}, torch.float32, "a state_size of at most 256, got 300"),
        ({"layer_state_sizes": [5, 300]}, torch.float32, "a state_size of at most 256, got 300"),
        ({"layer_state_sizes": [300, 5]}, torch.float32, ""),
        ({}, torch.float64, "float32, float16 or bfloat16, got torch.float64"),
    ],
)
def test_what_the_kernels_cannot_run_is_named(changes: dict[str, int], dtype: torch.dtype, message: str) -> None:
    assert StatefulMambaMixer(mamba_config(**changes), 1).kernel_limit(dtype) == message


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "kernel"])
@pytest.mark.parametrize("length", [1, 65, 3000])
def test_both_forms_equal_the_definition_on_a_gpu(length: int, backend: str) -> None:
    if backend == "kernel" and scan_module.selective_scan_fn is None:
        pytest.skip("mamba-ssm's selective_scan_fn is not installed")
    inputs = {name: value.float() for name, value in selective_inputs(length).items()}
    exact = run(scan_selective_reference, {name: value.double() for name, value in inputs.items()})
    ours = run(scan_selective, {name: value.cuda() for name, value in inputs.items()}, backend=backend)
    assert_equal_up_to(2e-5, {name: value.double().cpu() for name, value in ours.items()}, exact)
