"""The fused Mamba-2 mixer against the mixer in plain torch and float64; and which calls take which path."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.hybrids.mixer_base import StateMixer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, layers_mamba2_kernel, scan_ssd
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2Mixer
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.state_value import LayerState, OwnLayerState
from tests.hybrids.tiny_models import tiny_model
from tests.models.law import assert_equal_up_to, weights_like

# of padding, in NumPy, by which the interpreter computes
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
BATCH, HIDDEN, CHUNK = 2, 16, 64


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 takes torch, everything else the kernels."""
    for module in (ScanMixer, StateMixer):
        monkeypatch.setattr(module, "backend_for", lambda self, x: "kernel" if x.dtype.itemsize < 8 else "torch")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of the fused path, whether the output projection was inside."""
    calls: list[bool] = []
    operator = layers_mamba2_kernel._operator

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[7] is not None)
        return operator(*arguments)

    monkeypatch.setattr(layers_mamba2_kernel, "_operator", counted)
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


def inputs_of(mixer: Any, length: int, hidden: int = HIDDEN, batch: int = BATCH) -> tuple[Tensor, LayerState]:
    generator = torch.Generator().manual_seed(length)
    shapes = mixer.state_shape
    parts = [torch.randn(batch, *shape, generator=generator) for shape in (shapes.recurrent, shapes.conv)]
    return torch.randn(batch, length, hidden, generator=generator), LayerState(*parts)


def results(
    mixer: Any,
    x: Tensor,
    state: LayerState,
    rows: Rows | None = None,
    dtype: torch.dtype = torch.float32,
    of: str = "all",
    call: Any = None,
) -> dict[str, Tensor]:
    """Outputs at real tokens, both final states, and all gradients, in float64."""
    mixer = mixer.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {"x": x.to(dtype), "recurrent": state.recurrent.to(wide), "conv": state.conv.to(wide)}
    leaves = {
        name: leaf.detach().clone().requires_grad_(of != "no state" or name == "x") for name, leaf in leaves.items()
    }
    y, after = (mixer if call is None else call)(leaves["x"], LayerState(leaves["recurrent"], leaves["conv"]), rows)
    if rows is not None and rows.real is not None:
        y = y * rows.real[..., None]
    found = {"y": y, "final recurrent": after.recurrent, "final conv": after.conv}
    scored = {"all": list(found), "outputs": ["y"], "states": list(found)[1:], "no state": list(found)}[of]
    objective = sum(
        (found[name].double() * weights_like(found[name].double(), i)).sum() for i, name in enumerate(scored)
    )
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    leaves |= {name: weight for name, weight in mixer.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach().double().clone() for name, value in found.items()}


def assert_fused(
    fused: list[bool], mixer: Any, length: int, rows: Rows | None = None, hidden: int = HIDDEN, **options: Any
) -> None:
    """One call of the fused path with everything inside, equal to the torch path in float64."""
    x, state = inputs_of(mixer, length, hidden, batch=1 if rows is None else BATCH)
    actual = results(mixer, x, state, rows, **options)
    assert fused == [True]
    expected = results(mixer, x, state, rows, **options | {"dtype": torch.float64})
    assert_equal_up_to(1e-5, actual, expected)
    assert len(fused) == 1


@pytest.mark.parametrize("length", [2, 3, 63, 64, 65, 130])
def test_it_is_the_mixer_with_all_gradients(length: int, fused: list[bool]) -> None:
    assert_fused(fused, mixer_of(), length)


@pytest.mark.parametrize(("length", "shorter"), [(2, 1), (5, 2), (70, 64), (130, 65)])
def test_padding_changes_nothing(length: int, shorter: int, fused: list[bool]) -> None:
    assert_fused(fused, mixer_of(), length, Rows.of_lengths(torch.tensor([length, shorter]), length))


@pytest.mark.parametrize(
    "changes",
    [
        {"time_step_limit": (0.0, 0.5)},
        {"time_step_limit": (0.3, 0.5)},
        {"use_bias": False, "use_conv_bias": False, "n_groups": 1},
        {"num_heads": 3, "n_groups": 1},  # the projection is no multiple of 8 wide: slices cannot be read in vectors
        {"conv_kernel": 2},
    ],
    ids=str,
)
def test_it_follows_the_configuration(changes: dict[str, Any], fused: list[bool]) -> None:
    assert_fused(fused, mixer_of(**changes), 5)


@pytest.mark.parametrize("of", ["outputs", "states", "no state"])
def test_gradients_flow_from_and_to_what_asks_for_them(of: str, fused: list[bool]) -> None:
    assert_fused(fused, mixer_of(), 5, of=of)


def test_strong_and_missing_decays_are_exact(fused: list[bool]) -> None:
    mixer = mixer_of()
    with torch.no_grad():
        mixer.A_log.copy_(torch.tensor([9.0, -20.0, 3.0, 0.0]))
        mixer.dt_bias.copy_(torch.tensor([5.0, 5.0, -30.0, 0.0]))
    assert_fused(fused, mixer, 70)


def test_bfloat16_is_as_exact_as_on_the_torch_path(fused: list[bool]) -> None:
    mixer = mixer_of().to(torch.bfloat16).float()  # weights that bfloat16 has
    x, state = inputs_of(mixer, 70)
    x = x.bfloat16().float()
    actual, exact = results(mixer, x, state, dtype=torch.bfloat16), results(mixer, x, state, dtype=torch.float64)
    assert fused == [True]
    assert_equal_up_to(4e-2, actual, exact)


def test_mixed_precision_multiplies_in_bfloat16(fused: list[bool]) -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = results(mixer, x, state)
    assert fused == [True]
    assert_equal_up_to(5e-2, mixed, results(mixer, x, state, dtype=torch.float64))


def test_second_derivatives_are_refused() -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, 2)
    (gradient,) = torch.autograd.grad(mixer(x.requires_grad_(), state)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_a_compiled_mixer_is_one_graph_with_all_gradients() -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)
    rows = Rows.of_lengths(torch.tensor([5, 3]), 5)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    actual = results(mixer, x, state, rows, call=compiled)
    assert_equal_up_to(1e-6, actual, results(mixer, x, state, rows))


def test_activation_checkpointing_recomputes_it(fused: list[bool]) -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)
    call = functools.partial(checkpoint, mixer, use_reentrant=False)
    actual = results(mixer, x, state, call=call)
    assert fused == [True] * 2
    assert_equal_up_to(1e-6, actual, results(mixer, x, state))


def with_adapters(mixer: Any, *names: str) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=list(names), init_lora_weights=False, r=2), mixer)


def offloaded(mixer: Any) -> Any:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(mixer.norm, AlignDevicesHook())
    return mixer


def hooked(mixer: Any, name: str) -> Any:
    mixer.get_submodule(name).register_forward_hook(lambda module, arguments, output: None)
    return mixer


def parametrized(mixer: Any) -> Any:
    torch.nn.utils.parametrizations.weight_norm(mixer.conv1d)
    return mixer


class Watching(StatefulMamba2Mixer):
    def advance(self, *inputs: Tensor, **options: Any) -> tuple[Tensor, LayerState]:
        return super().advance(*inputs, **options)


def watched(mixer: Any) -> Any:
    mixer.__class__ = Watching
    return mixer


def steered(mixer: Any) -> Any:
    mixer.register_forward_hook(lambda module, arguments, output: (output[0].add_(0.0), output[1]))
    return mixer


def recorded(mixer: Any) -> Any:
    mixer.scan = mixer.scan
    return mixer


INSIDE, OUTSIDE, UNFUSED = [True], [False], []  # the output projection
PATHS: dict[str, tuple[Any, list[bool]]] = {
    "as it is": (lambda mixer: mixer, INSIDE),
    "LoRA on the input projection": (lambda mixer: with_adapters(mixer, "in_proj"), INSIDE),
    "LoRA on both projections": (lambda mixer: with_adapters(mixer, "in_proj", "out_proj"), OUTSIDE),
    "a hook on the output projection": (lambda mixer: hooked(mixer, "out_proj"), OUTSIDE),
    "a hook on the norm": (lambda mixer: hooked(mixer, "norm"), UNFUSED),
    "a hook on the convolution": (lambda mixer: hooked(mixer, "conv1d"), UNFUSED),
    "offloading": (offloaded, UNFUSED),
    "a parametrized convolution": (parametrized, UNFUSED),
    "a recorded scan": (recorded, UNFUSED),
    "a subclass that advances by itself": (watched, UNFUSED),
    "a hook that changes the outputs": (steered, INSIDE),
}


@pytest.mark.parametrize("name", PATHS)
def test_modules_that_are_more_than_their_weights_are_called(name: str, fused: list[bool]) -> None:
    change, expected = PATHS[name]
    mixer = change(mixer_of())
    x, state = inputs_of(mixer, 3)
    actual = results(mixer, x, state)
    assert fused == expected
    assert_equal_up_to(1e-5, actual, results(mixer, x, state, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize(("parts", "path"), [((), INSIDE), (("out_proj",), OUTSIDE), (("norm",), UNFUSED)], ids=str)
def test_sharded_weights_are_gathered(
    parts: tuple[str, ...], path: list[bool], fused: list[bool], tmp_path: Path
) -> None:
    """FSDP2: a module that is sharded by itself is called, the others have their weights in the mixer's forward."""
    mixer = mixer_of()
    x, state = inputs_of(mixer, 3)
    expected = results(mixer, x, state)
    fused.clear()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name in (*parts, ""):
            fully_shard(mixer.get_submodule(name), mesh=mesh)
        y, after = mixer(x, state)
        assert fused == path
        found = {"y": y, "final recurrent": after.recurrent, "final conv": after.conv}
        sum(
            (value.double() * weights_like(value.double(), i)).sum() for i, value in enumerate(found.values())
        ).backward()
        found |= {f"gradient of {name}": weight.grad.full_tensor() for name, weight in mixer.named_parameters()}
    finally:
        dist.destroy_process_group()
    found = {name: value.detach().double() for name, value in found.items()}
    assert_equal_up_to(1e-5, found, {name: expected[name] for name in found})


def test_what_the_kernels_cannot_take_goes_another_way(fused: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, 20)
    expected, _ = mixer(x, state)
    assert fused == [True]
    monkeypatch.setattr(scan_ssd, "_KERNEL_MAX_TOKENS", 16)
    actual, _ = mixer(x, state)
    assert len(fused) == 1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    mixer(x[:, :1], state)
    monkeypatch.undo()


def test_what_mixers_may_overwrite_is_not_returned() -> None:
    """Else a state out of the cache of `generate` changes in the next call that reads one token from it."""
    mixer = mixer_of()
    x, state = inputs_of(mixer, 2)
    with torch.no_grad():
        _, after = mixer(x, OwnLayerState(*state))
    assert type(after) is LayerState


def test_calls_that_need_more_than_the_kernels_take_are_known() -> None:
    mixer = mixer_of(time_step_limit=(0.1, 1.0))
    sizes = layers_mamba2_kernel.Mamba2Sizes(4, 8, 2, 8, CHUNK, 0.1, 1.0, 16, 1e-5)
    zxbcdt = mixer.in_proj(torch.randn(BATCH, 5, HIDDEN))
    padded = Rows.of_lengths(torch.tensor([5, 4]), 5)
    group = Rows((BATCH, 5), group=object())  # type: ignore[arg-type]
    free = sizes._replace(least=0.0)
    takes = layers_mamba2_kernel.takes
    assert takes(zxbcdt, None, sizes, ())
    assert takes(zxbcdt, padded, free, ())
    assert not takes(zxbcdt, padded, sizes, ())  # padding would write into the state
    assert not takes(zxbcdt, group, free, ())
    assert not takes(zxbcdt[:, :1], None, free, ())
    assert not takes(zxbcdt, None, free._replace(norm_group=2**15), ())


HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "falcon_h1, gate alone": {"mamba_rms_norm": False},
    "granitemoehybrid": {},
    "mamba2": {},
    "nemotron_h": {},
    "zamba2": {},
}


def wrapped_mixer(case: str) -> tuple[Any, Any]:
    model: Any = stateful(tiny_model(case.partition(",")[0], **HYBRIDS[case]))
    return model, next(module for module in model.modules() if isinstance(module, StateMixer))


@pytest.mark.parametrize("case", HYBRIDS)
def test_a_wrapped_mixer_gives_what_it_gives_in_torch(case: str, fused: list[bool]) -> None:
    _, mixer = wrapped_mixer(case)
    assert_fused(fused, mixer, 5, call=mixer.read, hidden=32)


class NormOfAllChannels(torch.nn.Module):
    """That of Mamba-2, Bamba and Granite 4 before Transformers 5.24."""

    def __init__(self, grouped: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = grouped.weight, grouped.variance_epsilon

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        gated = y * torch.nn.functional.silu(gate)
        return self.weight * gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.variance_epsilon)


def test_a_norm_goes_over_the_channels_of_its_class(fused: list[bool]) -> None:
    _, mixer = wrapped_mixer("mamba2")
    assert mixer.n_groups > 1
    mixer.norm = NormOfAllChannels(mixer.norm)
    assert_fused(fused, mixer, 5, call=mixer.read, hidden=32)


def test_a_wrapped_model_takes_it_with_states_and_without(fused: list[bool]) -> None:
    model, _ = wrapped_mixer("falcon_h1")
    mixers = sum(isinstance(module, StateMixer) for module in model.modules())
    tokens = torch.arange(3, 6)[None]
    with torch.no_grad():
        plain = model(tokens)
        assert fused == [True] * mixers
        initial = model(tokens, initial_state=model.zero_state(1))
        assert fused == [True] * 2 * mixers
        exact = model.double()(tokens, initial_state=model.zero_state(1))
    torch.testing.assert_close(plain.logits, initial.logits, rtol=0, atol=0)
    torch.testing.assert_close(initial.logits.double(), exact.logits, rtol=1e-5, atol=1e-5)
