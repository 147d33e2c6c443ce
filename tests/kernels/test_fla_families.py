"""Families on the kernels of fla: models, convolution and norms against the torch path in float64."""

import inspect
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models import (
    layers_conv,
    layers_delta,
    layers_fla,
    scan_delta,
    scan_gla,
    scan_rwkv6,
    scan_trapezoid,
)
from hf_recurrent_lengthgen.models.layers_conv import causal_conv
from hf_recurrent_lengthgen.models.layers_delta import l2_norm
from hf_recurrent_lengthgen.models.layers_fla import HeadRMSNorm
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.scan_fla_kernels import scan_with_fla
from tests.models.families import DELTA_NET, GATED_DELTANET, GLA, Family, build, random_state
from tests.models.law import assert_equal_up_to, model_step, run_in_chunks

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 16, "num_heads": 2}
CONVOLUTIONS = {"use_short_conv": True, "conv_size": 3}
FUNCTIONS = {
    "convolution": (layers_conv, "fla_causal_conv1d"),
    "l2 norm": (layers_delta, "fla_l2norm"),
    "gated norm": (layers_fla, "rms_norm_gated"),
    "SwiGLU": (layers_fla, "swiglu"),
    "scan of GLA": (scan_gla, "chunk_gla"),
    "scan of the delta rule": (scan_delta, "chunk_gated_delta_rule"),
}


@pytest.fixture(autouse=True)
def backend_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too; and fla's convolution, as where causal-conv1d is not installed."""
    monkeypatch.setattr(ScanMixer, "backend_for", lambda mixer, x: mixer.config.scan_backend)
    monkeypatch.setattr(layers_conv, "causal_conv1d_fn", layers_conv._convolve_with_fla)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which functions of fla were called."""
    names: set[str] = set()

    def recorded(name: str, function: Any) -> Any:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            names.add(name)
            return function(*arguments, **options)

        return call

    for name, (module, attribute) in FUNCTIONS.items():
        monkeypatch.setattr(module, attribute, recorded(name, getattr(module, attribute)))
    return names


def results(
    family: Family, changes: dict[str, Any], dtype: torch.dtype, backend: str, cuts: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """Outputs, states and gradients of a model for rows of 67 and 60 tokens."""
    model = build(family, **{**family.fields, **SMALL, **changes})
    state = tuple(type(layer)(*(part.to(dtype) for part in layer)) for layer in random_state(model, 2))
    model.config.scan_backend = backend
    model.to(dtype)
    embeds = torch.randn(2, 67, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.ones(2, 67, dtype=torch.long)
    mask[0, 60:] = 0
    parameters = {name: p for name, p in model.named_parameters() if "embeddings" not in name}
    found = run_in_chunks(model_step(model), parameters, embeds, state, cuts, mask)
    return {name: value.double() for name, value in found.items()}


@pytest.mark.parametrize(
    ("family", "changes", "cuts", "expected"),
    [
        (GLA, {"use_output_gate": True}, (1,), {"gated norm", "SwiGLU", "scan of GLA"}),
        (
            GLA,
            CONVOLUTIONS | {"num_kv_heads": 1, "use_output_gate": False},
            (2, 3),
            {"convolution", "SwiGLU", "scan of GLA"},
        ),
        (
            GATED_DELTANET,
            CONVOLUTIONS | {"output_gate_activation": "sigmoid"},
            (1,),
            {"convolution", "gated norm", "l2 norm", "SwiGLU", "scan of the delta rule"},
        ),
        (
            DELTA_NET,
            {"use_short_conv": False, "use_gate": True, "qk_norm": "l2"},
            (),
            {"gated norm", "l2 norm", "SwiGLU", "scan of the delta rule"},
        ),
    ],
    ids=["gla", "gla with convolutions", "gated_deltanet", "delta_net"],
)
def test_a_model_in_chunks_on_kernels_is_the_whole_in_torch(
    family: Family, changes: dict[str, Any], cuts: tuple[int, ...], expected: set[str], called: set[str]
) -> None:
    """Outputs, final states and all gradients, of padded rows, the states carried; one token has no kernel."""
    exact = results(family, changes, torch.float64, "torch")
    assert not called
    assert_equal_up_to(2e-5, results(family, changes, torch.float32, "kernel", cuts), exact)
    assert called == expected


def gradients(function: Any, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Results and gradients in float64."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    found = [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]
    return {str(index): value.detach().double() for index, value in enumerate(found)}


DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("length", [2, 3, 70])
def test_the_convolution_of_fla_is_the_convolution(
    length: int, activation: bool, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """From any state, to the state after it; x is a part of a projection."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, 24), (8, 4), (2, 8, 3), *[(8,)] * bias]
    leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def convolve(x: Tensor, weight: Tensor, state: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
        state = state.to(torch.promote_types(x.dtype, torch.float32))
        backend: Any = "torch" if x.dtype == torch.float64 else "kernel"
        return causal_conv(x[..., 8:16], weight, *(bias or [None]), state, None, backend, activation)

    exact = gradients(convolve, [leaf.double() for leaf in leaves])
    assert_equal_up_to(tolerance, gradients(convolve, leaves), exact)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("affine", [False, True])
def test_the_norms_of_fla_are_the_norms(
    affine: bool, activation: str, dtype: torch.dtype, tolerance: float, called: set[str]
) -> None:
    """The gated norm of heads and the norm of keys, also of a token of zeros."""
    generator = torch.Generator().manual_seed(0)
    y, gate, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in [(2, 37, 3, 20), (2, 37, 60), 20]
    )
    y[0, 0] = 0

    def norms(y: Tensor, gate: Tensor, *weight: Tensor) -> list[Tensor]:
        norm = HeadRMSNorm(20, 1e-5, affine)
        if weight:
            del norm.weight
            norm.weight = weight[0]
        backend: Any = "torch" if y.dtype == torch.float64 else "kernel"
        return [norm(y, gate, backend, activation), l2_norm(y + 1, backend)]

    leaves = [y, gate, *[weight] * affine]
    exact = gradients(norms, [leaf.double() for leaf in leaves])
    assert not called
    assert_equal_up_to(tolerance, gradients(norms, leaves), exact)
    assert called == {"gated norm", "l2 norm"}


def test_states_are_not_copied_where_a_scan_takes_them_as_they_are() -> None:
    """Also where they are transposes, as those of hybrids are."""
    for module, name in (
        (scan_gla, "chunk_gla"),
        (scan_trapezoid, "chunk_simple_gla"),
        (scan_delta, "chunk_gated_delta_rule"),
        (scan_delta, "chunk_kda"),
    ):
        assert "state_v_first" in inspect.signature(getattr(module, name)).parameters, name
    for module, name in ((scan_rwkv6, "chunk_rwkv6"), (scan_delta, "chunk_dplr_delta_rule")):
        assert "state_v_first" not in inspect.signature(getattr(module, name)).parameters, name

    def scan(x: Tensor, initial_state: Tensor, state_v_first: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        assert initial_state.is_contiguous()
        assert initial_state.shape[2:] == ((5, 4) if state_v_first else (4, 5))
        return x, initial_state

    x, state = torch.zeros(2, 3, 2, 4), torch.randn(2, 2, 5, 4)
    for initial_state in (state, state.mT.contiguous().mT):
        final_state = scan_with_fla(scan, [x], initial_state)[1]
        assert torch.equal(final_state, state)
        assert final_state.data_ptr() == initial_state.data_ptr()
