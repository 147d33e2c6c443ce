"""The selective scan in Triton against its definition in float64, and the mixers that take it."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus
from torch.utils.checkpoint import checkpoint

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.hybrids.mixer_base import StateMixer
from hf_recurrent_lengthgen.models import (
    StatefulMambaConfig,
    layers_conv,
    modeling_stateful_mamba,
    scan_selective,
    scan_selective_kernel,
)
from hf_recurrent_lengthgen.models.modeling_stateful_mamba import StatefulMambaMixer
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.scan_selective_kernel import ScanOfModules, selective_scan
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import build, random_state
from tests.models.family_mamba import FALCON_MAMBA, MAMBA
from tests.models.law import assert_equal_up_to, model_step, run_in_chunks, weights_like
from tests.models.scans import SELECTIVE
from tests.models.test_scans import run

from .test_fused_mamba2 import inputs_of, kernels_on_a_cpu, results, with_adapters

__all__ = ["kernels_on_a_cpu"]

# of padding and of strong gates, in NumPy, by which the interpreter computes
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")
NAMES = ("x", "dt", "A", "B", "C", "D", "state", "gate")


def definition(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor, gate: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Token by token; steps before softplus."""
    outputs = []
    for t in range(x.shape[1]):
        step = softplus(dt[:, t], threshold=50)
        state = (step[..., None] * A).exp() * state + (step * x[:, t])[..., None] * B[:, t, None]
        outputs.append(((state * C[:, t, None]).sum(-1) + D * x[:, t]) * silu(gate[:, t]))
    return torch.stack(outputs, 1), state


def random_inputs(length: int, channels: int, states: int, rows: int = 1) -> dict[str, Tensor]:
    """In float64, of numbers that bfloat16 has."""
    generator = torch.Generator().manual_seed(length)
    every, token = (rows, length, channels), (rows, length, states)
    shapes = every, every, (channels, states), token, token, (channels,), (rows, channels, states), every
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, shapes, strict=True)}
    inputs["dt"] = 3 * inputs["dt"] - 1
    inputs["A"] = -4 * inputs["A"].exp()
    return {name: value.bfloat16().double() for name, value in inputs.items()}


def measured(
    scan: Any, inputs: dict[str, Tensor], scored: str = "both", fixed: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Outputs, final state and all gradients."""
    leaves = {name: value.detach().requires_grad_(name not in fixed) for name, value in inputs.items()}
    y, state = scan(*leaves.values(), softplus=True)
    objective = sum(
        (part.double() * weights_like(part.double(), seed).bfloat16()).sum()
        for seed, part in enumerate((y, state))
        if scored == "both" or seed == ("y", "state").index(scored)
    )
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(objective, list(trained.values()), allow_unused=True, materialize_grads=True)
    found = {"y": y, "final": state} | {f"of {name}": g for name, g in zip(trained, gradients, strict=True)}
    return {name: value.detach() for name, value in found.items()}


def in_float32(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in inputs.items()}


def assert_exact(inputs: dict[str, Tensor], tolerance: float = 1e-6, **options: Any) -> None:
    actual = measured(selective_scan, in_float32(inputs), **options)
    assert_equal_up_to(
        tolerance,
        {name: value.double() for name, value in actual.items()},
        measured(definition, inputs, **options),
    )


@pytest.mark.parametrize(
    ("length", "channels", "states", "rows"),
    [
        (1, 3, 5, 2),
        (2, 3, 1, 2),
        (3, 37, 8, 2),  # channels of two programs
        (63, 2, 16, 1),
        (64, 5, 3, 1),
        (65, 3, 16, 1),
        (20, 9, 33, 1),  # shorter and narrower tiles
        (130, 3, 5, 1),  # longer than a chunk
    ],
)
def test_it_is_the_definition_with_all_gradients(length: int, channels: int, states: int, rows: int) -> None:
    assert_exact(random_inputs(length, channels, states, rows))


@pytest.mark.parametrize("length", [1, 20])
def test_scans_of_steps_without_a_gate_take_it(length: int) -> None:
    inputs = SELECTIVE.make_inputs(length)
    actual = run(SELECTIVE, SELECTIVE.scan, {name: value.float() for name, value in inputs.items()}, backend="kernel")
    expected = run(SELECTIVE, SELECTIVE.reference, inputs)
    assert_equal_up_to(1e-6, {name: value.double() for name, value in actual.items()}, expected)


@pytest.mark.parametrize("options", [{"scored": "y"}, {"scored": "state"}, {"fixed": ("state",)}], ids=str)
def test_gradients_flow_from_and_to_what_asks_for_them(options: dict[str, Any]) -> None:
    assert_exact(random_inputs(9, 3, 5), **options)


def test_extremes_are_exact() -> None:
    """Erasure, no step, padding, tiny and large steps, closed and open gates, over tiles and chunks."""
    inputs = random_inputs(130, 3, 4)
    inputs["A"][0], inputs["A"][1] = -1000.0, -1e-6
    for token, step in (
        (0, 1000.0),
        (1, -torch.inf),
        (7, 60.0),
        (8, -18.0),
        (9, -torch.inf),
        (127, 60.0),
        (128, -87.0),
    ):
        inputs["dt"][:, token] = step
    inputs["dt"][:, 20:60] = -torch.inf
    inputs["gate"][:, 5], inputs["gate"][:, 6] = -200.0, 200.0
    assert_exact(inputs)


def test_small_steps_keep_their_digits() -> None:
    """1 + e^-9 in float32 keeps three digits of e^-9."""
    inputs = random_inputs(9, 3, 4)
    inputs["dt"], inputs["state"] = inputs["dt"] - 12, torch.zeros_like(inputs["state"])
    assert_exact(inputs, 3e-6)


def test_padding_leaves_the_state_and_gets_no_gradient() -> None:
    inputs = random_inputs(12, 3, 5, rows=2)
    inputs["dt"][:, 5:] = -torch.inf
    whole = measured(selective_scan, in_float32(inputs), scored="state")
    over_time = [name for name in NAMES if name not in ("A", "D", "state")]
    short = {name: value[:, :5] if name in over_time else value for name, value in in_float32(inputs).items()}
    expected = measured(selective_scan, short, scored="state")
    for name in ("final", "of A", "of state"):
        torch.testing.assert_close(whole[name], expected[name], rtol=0, atol=0)
    for name in over_time:
        padded = pad(expected[f"of {name}"], (0, 0, 0, 7))
        torch.testing.assert_close(whole[f"of {name}"], padded, rtol=0, atol=0)


def test_bfloat16_is_rounded_once() -> None:
    """What comes in bfloat16 goes back in it, and is computed in float32. The interpreter rounds towards zero."""
    inputs = random_inputs(20, 3, 5)
    low = {
        name: value.to(torch.bfloat16 if name in ("x", "B", "C", "gate") else torch.float32)
        for name, value in inputs.items()
    }
    actual, exact = measured(selective_scan, low), measured(definition, inputs)
    assert actual["y"].dtype == actual["of gate"].dtype == torch.bfloat16
    assert actual["final"].dtype == actual["of dt"].dtype == torch.float32
    for name, value in actual.items():
        expected = exact[name]
        unit = 2**-7 if value.dtype == torch.bfloat16 else 2e-6
        assert ((value.double() - expected).abs() <= unit * expected.abs() + 1e-6 * expected.abs().max()).all(), name


def test_slices_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a projection, one projection for all rows, and channels that are not last in memory."""
    inputs = in_float32(random_inputs(9, 4, 5, rows=2))
    expected = measured(selective_scan, inputs)
    strided = dict(inputs)
    strided["x"] = torch.cat([inputs["gate"], inputs["x"], inputs["dt"]], -1)[..., 4:8]
    strided["B"] = torch.cat([inputs["B"], inputs["C"]], -1)[..., :5]
    strided["gate"] = inputs["gate"].mT.contiguous().mT
    strided["dt"] = inputs["dt"].repeat_interleave(2, 1)[:, ::2]
    actual = measured(selective_scan, strided)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *shape, **options: new_empty(self, *shape, **options).fill_(torch.nan)
    )
    for length in (3, 8):
        assert all(
            value.isfinite().all()
            for value in measured(selective_scan, in_float32(random_inputs(length, 3, 5))).values()
        )


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []

    def on_device_of(tensor: Tensor) -> Any:
        chosen.append(tensor.device)
        return nullcontext()

    monkeypatch.setattr(scan_selective_kernel, "_on_device_of", on_device_of)
    inputs = in_float32(random_inputs(2, 3, 1))
    measured(selective_scan, inputs)
    assert chosen == [inputs["x"].device] * 2


def test_without_gradients_no_states_are_kept() -> None:
    inputs = in_float32(random_inputs(9, 3, 5))
    with torch.no_grad():
        y, state = selective_scan(*inputs.values(), softplus=True)
    expected = measured(selective_scan, inputs)
    assert torch.equal(y, expected["y"])
    assert torch.equal(state, expected["final"])


def test_second_derivatives_are_refused() -> None:
    inputs = in_float32(random_inputs(3, 3, 5))
    inputs["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(
        selective_scan(*inputs.values(), softplus=True)[0].sum(), inputs["x"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_compiled_graph_holds_it() -> None:
    inputs = in_float32(random_inputs(9, 3, 5))
    compiled = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")
    assert_equal_up_to(1e-7, measured(compiled, inputs), measured(selective_scan, inputs))


# --- the mixers ---


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each call of the kernel, what is inside: also softplus and gate, or also what makes its inputs."""
    calls: list[str] = []

    def counted(*inputs: Any, softplus: bool = False) -> Any:
        assert softplus == (len(inputs) == 8)
        calls.append("gate" if softplus else "scan")
        return selective_scan(*inputs, softplus=softplus)

    def counted_modules(*inputs: Any) -> Any:
        calls.append("modules")
        return ScanOfModules.apply(*inputs)

    monkeypatch.setattr(modeling_stateful_mamba, "ScanOfModules", SimpleNamespace(apply=counted_modules))
    for module in (scan_selective, modeling_stateful_mamba):
        monkeypatch.setattr(module, "selective_scan", counted)
    return calls


def mixer_of(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 5, "time_step_rank": 3, "num_hidden_layers": 1}
    mixer = StatefulMambaMixer(StatefulMambaConfig(**sizes | changes), 0)
    mixer.init_weights()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer


def assert_as_in_torch(mixer: Any, length: int, rows: Rows | None = None, hidden: int = 16, **options: Any) -> None:
    x, state = inputs_of(mixer, length, hidden)
    actual = results(mixer, x, state, rows, **options)
    assert_equal_up_to(1e-5, actual, results(mixer, x, state, rows, **options | {"dtype": torch.float64}))


@pytest.mark.parametrize("changes", [{}, {"mixer_rms_eps": 1e-6}], ids=["mamba", "falcon_mamba"])
@pytest.mark.parametrize("lengths", [None, [9, 4]], ids=["whole rows", "padding"])
def test_the_mixer_is_that_of_torch_with_all_gradients(lengths: Any, changes: Any, fused: list[str]) -> None:
    rows = None if lengths is None else Rows.of_lengths(torch.tensor(lengths), 9)
    assert_as_in_torch(mixer_of(**changes), 9, rows)
    assert fused == ["modules"]


@pytest.mark.parametrize("of", ["outputs", "states", "no state"])
def test_the_mixer_has_gradients_from_and_to_what_asks_for_them(of: str) -> None:
    assert_as_in_torch(mixer_of(), 5, of=of)


def test_mixed_precision_is_that_of_the_forward_pass(fused: list[str]) -> None:
    """The backward pass calls modules again, in bfloat16: gradients are then those of a pass that keeps everything."""
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)

    def mixed(*inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return mixer(*inputs)

    found = [results(mixer, x, state, call=mixed)]
    mixer.x_proj.register_forward_hook(lambda *_: None)
    found.append(results(mixer, x, state, call=mixed))
    assert fused == ["modules", "gate"]
    assert_equal_up_to(1e-6, *found)
    assert_equal_up_to(5e-2, found[0], results(mixer, x, state, dtype=torch.float64))


def test_frozen_weights_get_no_gradient_and_others_theirs(fused: list[str]) -> None:
    mixer = mixer_of()
    for name in ("conv1d.weight", "x_proj.weight", "A_log"):
        mixer.get_parameter(name).requires_grad_(False)
    assert_as_in_torch(mixer, 5)
    assert fused == ["modules"]


def test_weights_that_are_replaced_before_the_backward_pass_are_an_error() -> None:
    mixer = mixer_of()
    y, _ = mixer(*inputs_of(mixer, 2))
    mixer.x_proj.weight = torch.nn.Parameter(mixer.x_proj.weight.detach().clone())
    with pytest.raises(RuntimeError, match="not have been used"):
        y.sum().backward()


def test_states_alone_are_trained_while_all_weights_are_frozen(fused: list[str]) -> None:
    assert_as_in_torch(mixer_of().requires_grad_(False), 3)
    assert fused == ["modules"]


def test_hooks_on_weights_run_once(fused: list[str]) -> None:
    mixer = mixer_of()
    mixer.x_proj.weight.register_hook(lambda gradient: gradient / 2)
    assert_as_in_torch(mixer, 5)
    assert fused == ["gate"]


def test_weights_that_are_no_parameters_learn(fused: list[str]) -> None:
    """As those of a replica of DataParallel."""
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)
    expected = {name: value for name, value in results(mixer, x, state).items() if name.startswith("gradient of ")}
    copied = replica(mixer)
    found = results(mixer, x, state, call=copied)
    assert fused == ["modules", "gate"]
    assert_equal_up_to(1e-5, {name: found[name] for name in expected}, expected)


def replica(module: Any) -> Any:
    copied = module._replicate_for_data_parallel()
    for name, weight in module._parameters.items():
        setattr(copied, name, None if weight is None else weight.view_as(weight))
    for name, child in module.named_children():
        setattr(copied, name, replica(child))
    return copied


def test_the_mixer_keeps_its_projection_and_its_output() -> None:
    """x, gate, y and few numbers for each token, as mamba-ssm: no convolved x, steps or decays."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    mixer = mixer_of(hidden_size=64)
    sizes = []
    for length in (2, 130):
        x, state = inputs_of(mixer, length, 64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y, _ = mixer(x.requires_grad_(), state)
        sizes.append(sum(kept.values()))
        kept.clear()
        del y
    channels = 2 * 64
    per_token = (sizes[1] - sizes[0]) / (inputs_of(mixer, 128, 64)[0].numel() // 64) / 4
    states = channels * mixer.state_size / 128
    assert per_token <= 64 + 3 * channels + states + 1  # input of the mixer; x, gate and y; states of chunks


@pytest.mark.parametrize(
    ("names", "inside"),
    [(["dt_proj"], "gate"), (["x_proj", "in_proj", "out_proj"], "gate"), (["in_proj", "out_proj"], "modules")],
    ids=str,
)
def test_adapters_are_read(names: list[str], inside: str, fused: list[str]) -> None:
    assert_as_in_torch(with_adapters(mixer_of(), *names), 5)
    assert fused == [inside]


def test_activation_checkpointing_calls_it_again(fused: list[str]) -> None:
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)
    actual = results(mixer, x, state, call=functools.partial(checkpoint, mixer, use_reentrant=False))
    assert fused == ["modules"] * 2
    assert_equal_up_to(1e-6, actual, results(mixer, x, state))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does
def test_a_compiled_mixer_is_one_graph_with_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose convolution is in torch: kernels of others break a graph."""
    monkeypatch.setattr(layers_conv, "causal_conv1d_fn", None)
    mixer = mixer_of()
    x, state = inputs_of(mixer, 5)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    assert_equal_up_to(1e-6, results(mixer, x, state, call=compiled), results(mixer, x, state))


def recorded(mixer: Any) -> Any:
    mixer.scan = mixer.scan
    return mixer


@pytest.mark.parametrize(
    ("mixer", "length", "calls"),
    [
        (mixer_of, 5, ["modules"]),
        (mixer_of, 1, []),
        (lambda: recorded(mixer_of()), 5, ["scan"]),
        (lambda: mixer_of(forgetting={"delta_scale": 0.5}), 5, ["scan"]),
    ],
    ids=["several tokens", "one token", "a recorded scan", "forgetting"],
)
def test_what_acts_on_the_inputs_of_the_scan_gets_them(
    mixer: Any, length: int, calls: list[str], fused: list[str]
) -> None:
    assert_as_in_torch(mixer(), length)
    assert fused == calls


@pytest.mark.parametrize("family", [MAMBA, FALCON_MAMBA], ids=["mamba", "falcon_mamba"])
@pytest.mark.parametrize("cuts", [(), (1, 6)], ids=["whole", "in chunks"])
def test_models_carry_states_as_in_torch(family: Any, cuts: tuple[int, ...]) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 3:5] = mask[1, 9:] = 0
    found = []
    for dtype in (torch.float32, torch.float64):
        model = build(family, torch.float32).to(dtype)
        embeds = weights_like(torch.empty(2, 12, model.config.hidden_size), 0).to(dtype)
        state = random_state(build(family, torch.float32), 2)
        state = tuple(type(layer)(*(part.to(dtype) for part in layer)) for layer in state)
        parameters = {name: p for name, p in model.named_parameters() if "embeddings" not in name}
        found.append(run_in_chunks(model_step(model), parameters, embeds, state, cuts, mask))
    assert_equal_up_to(1e-5, {name: value.double() for name, value in found[0].items()}, found[1])


def test_packed_sequences_start_anew() -> None:
    model = build(MAMBA, torch.float32)
    tokens, positions = torch.arange(3, 12)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
    with torch.no_grad():
        packed = model(tokens, position_ids=positions).logits
        exact = model.double()(tokens, position_ids=positions).logits
    torch.testing.assert_close(packed.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["falcon_mamba", "jamba", "mamba", "zamba"])
def test_a_wrapped_mixer_gives_what_it_gives_in_torch(model_type: str, fused: list[str]) -> None:
    model: Any = stateful(tiny_model(model_type))
    mixer = next(module for module in model.modules() if isinstance(module, StateMixer))
    rows = Rows.of_lengths(torch.tensor([5, 3]), 5)
    assert_as_in_torch(mixer, 5, rows, model.config.hidden_size, call=mixer.read)
    assert set(fused) == {"gate" if model_type == "zamba" else "modules"}
