"""The fused Mamba-2 mixer against the mixer in plain torch and float64; and which calls take which path."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.mixer_base import StateMixer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, layers_mamba2_kernel
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2Mixer
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.state_value import LayerState
from tests.models.law import assert_equal_up_to, weights_like

# of padding, in NumPy, by which the interpreter computes
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
BATCH, HIDDEN, CHUNK = 2, 16, 16


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 takes torch, everything else the kernels."""
    for module in (ScanMixer, StateMixer):
        monkeypatch.setattr(module, "backend_for", lambda self, x: "kernel" if x.dtype.itemsize < 8 else "torch")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of the fused path, whether the output projection was inside."""
    calls: list[bool] = []
    apply = layers_mamba2_kernel._FusedMamba2.apply

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[7] is not None)
        return apply(*arguments)

    monkeypatch.setattr(layers_mamba2_kernel._FusedMamba2, "apply", counted)
    return calls


def mixer_of(strength: float = 0.1, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": CHUNK}
    mixer = StatefulMamba2Mixer(StatefulMamba2Config(**{**sizes, "use_bias": True, **changes}), 0)
    mixer.init_weights()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(strength * torch.randn_like(parameter))
    return mixer


def inputs_of(mixer: Any, length: int) -> tuple[Tensor, LayerState]:
    generator = torch.Generator().manual_seed(length)
    shapes = mixer.state_shape
    parts = [torch.randn(BATCH, *shape, generator=generator) for shape in (shapes.recurrent, shapes.conv)]
    return torch.randn(BATCH, length, HIDDEN, generator=generator), LayerState(*parts)


def results(
    mixer: Any,
    x: Tensor,
    state: LayerState,
    rows: Rows | None = None,
    dtype: torch.dtype = torch.float32,
    of: str = "all",
) -> dict[str, Tensor]:
    """Outputs at real tokens, both final states, and all gradients, in float64."""
    mixer = mixer.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {"x": x.to(dtype), "recurrent": state.recurrent.to(wide), "conv": state.conv.to(wide)}
    leaves = {
        name: leaf.detach().clone().requires_grad_(of != "no state" or name == "x") for name, leaf in leaves.items()
    }
    y, after = mixer(leaves["x"], LayerState(leaves["recurrent"], leaves["conv"]), rows)
    if rows is not None and rows.real is not None:
        y = y * rows.real[..., None]
    found = {"y": y, "final recurrent": after.recurrent, "final conv": after.conv}
    scored = {"all": list(found), "outputs": ["y"], "states": list(found)[1:], "no state": list(found)}[of]
    objective = sum(
        (found[name].double() * weights_like(found[name].double(), i)).sum() for i, name in enumerate(scored)
    )
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad} | dict(mixer.named_parameters())
    gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach().double().clone() for name, value in found.items()}


@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 37])
@pytest.mark.parametrize("lengths", [None, "padded"], ids=str)
def test_outputs_states_and_gradients_are_those_of_the_mixer(length: int, lengths: Any, fused: list[bool]) -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, length)
    rows = None if lengths is None else Rows.of_lengths(torch.tensor([length, max(1, length - 3)]), length)
    actual = results(mixer, x, state, rows)
    assert fused == [True]
    assert_equal_up_to(1e-5, actual, results(mixer, x, state, rows, torch.float64))
    assert len(fused) == 1
