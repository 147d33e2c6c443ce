"""The state value: its functions, its checks and its files."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_recurrent_lengthgen.models import state_on_disk
from hf_recurrent_lengthgen.models.state_on_disk import load_state, save_state, write_tensors
from hf_recurrent_lengthgen.models.state_value import (
    LayerShape,
    LayerState,
    RecurrentState,
    check_finite_state,
    check_state,
    clone_state,
    concatenate_rows,
    detach_state,
    keep_rows,
    map_state,
    state_batch_size,
    state_dtype,
    state_to,
    take_rows,
    zero_conv,
    zero_state,
)

from .families import FAMILIES, Family, build, random_state, random_tokens, variant_id

SHAPES = (LayerShape((2, 3, 4), (5, 3)), LayerShape((2, 3, 4), (5, 3)))
CPU = torch.device("cpu")


def state_of(rows: int = 3) -> RecurrentState:
    """Random numbers, of which no two are equal."""
    generator = torch.Generator().manual_seed(rows)
    return map_state(lambda part: torch.randn(part.shape, generator=generator), zero_state(SHAPES, rows))


def assert_same(state: RecurrentState, other: RecurrentState) -> None:
    assert all(isinstance(layer, LayerState) for layer in state)
    torch.testing.assert_close(state, other, rtol=0, atol=0)


def test_the_zero_state_has_the_requested_shapes_rows_and_dtype() -> None:
    state = zero_state(SHAPES, 7, dtype=torch.float64)
    assert [[tuple(part.shape) for part in layer] for layer in state] == [[(7, 2, 3, 4), (7, 5, 3)]] * 2
    assert all(part.dtype == torch.float64 and not part.any() for layer in state for part in layer)
    assert state_batch_size(state) == 7
    assert zero_state(SHAPES, 1)[0].conv.dtype == torch.float32
    for model_dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert state_dtype(model_dtype) == torch.float32
    assert state_dtype(torch.float64) == torch.float64


ROWS: dict[str, tuple[Callable[[RecurrentState], RecurrentState], Callable[[torch.Tensor], torch.Tensor]]] = {
    "taken by numbers": (lambda state: take_rows(state, torch.tensor([2, 0, 2])), lambda x: x[[2, 0, 2]]),
    "taken by slice": (lambda state: take_rows(state, slice(1, None)), lambda x: x[1:]),
    "kept": (
        lambda state: keep_rows(state, torch.tensor([True, False, True])),
        lambda x: torch.stack([x[0], torch.zeros_like(x[1]), x[2]]),
    ),
    "stacked": (lambda state: concatenate_rows([take_rows(state, slice(2, 3)), state]), lambda x: x[[2, 0, 1, 2]]),
    "detached": (detach_state, torch.clone),
    "cloned": (clone_state, torch.clone),
    "on a device": (lambda state: state_to(state, "cpu"), torch.clone),
    "checked": (lambda state: check_state([list(x) for x in state], SHAPES, 3, CPU, torch.float32), torch.clone),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ROWS)
def test_functions_on_rows_act_on_every_part_and_change_none(name: str) -> None:
    function, of_part = ROWS[name]
    state = state_of()
    assert_same(function(state), map_state(of_part, state_of()))
    assert_same(state, state_of())
    assert not zero_conv(state)[1].conv.any()
    assert_same(tuple(layer._replace(conv=torch.zeros_like(layer.conv)) for layer in state), zero_conv(state))


def test_dropped_rows_and_their_gradients_are_zero_even_from_nan() -> None:
    state = state_of()
    state[0].recurrent[1], state[1].conv[1] = float("nan"), float("inf")
    state = map_state(torch.Tensor.requires_grad_, state)
    kept = keep_rows(state, torch.tensor([True, False, True]))
    assert not kept[0].recurrent[1].any()
    sum((part * part).sum() for layer in kept for part in layer).backward()
    assert state[0].recurrent.grad is not None
    assert not state[0].recurrent.grad[1].any()
    torch.testing.assert_close(state[1].conv.grad[0], 2 * state[1].conv[0])  # type: ignore[index]


def test_a_clone_keeps_gradients_and_a_detached_state_keeps_no_history() -> None:
    state = map_state(torch.Tensor.requires_grad_, state_of())
    clone = clone_state(state)
    assert clone[0].recurrent.data_ptr() != state[0].recurrent.data_ptr()
    assert clone[0].recurrent.requires_grad
    assert not any(part.requires_grad for layer in detach_state(state) for part in layer)


def replaced(layer: int, **parts: Any) -> Callable[[RecurrentState], Any]:
    return lambda state: (*state[:layer], state[layer]._replace(**parts), *state[layer + 1 :])


MUST_BE = "layer {}, part '{}' must be a tensor"
BAD_STATES: dict[str, tuple[Callable[[RecurrentState], Any], str]] = {
    "too few layers": (lambda state: state[:1], "s has 1 layers, the model has 2"),
    "too many layers": (lambda state: (*state, *state), "s has 4 layers, the model has 2"),
    "shape": (replaced(1, recurrent=torch.zeros(3, 2, 4, 3)), MUST_BE.format(1, "recurrent") + " (3, 2, 3, 4)"),
    "conv of K columns": (replaced(0, conv=torch.zeros(3, 5, 4)), MUST_BE.format(0, "conv") + " (3, 5, 3)"),
    "rows": (
        lambda state: take_rows(state, slice(2)),
        MUST_BE.format(0, "recurrent") + " (3, 2, 3, 4), the rows first",
    ),
    "dtype": (
        replaced(1, conv=torch.zeros(3, 5, 3).bfloat16()),
        "torch.float32 on cpu (full precision; state_to moves states",
    ),
    "device": (
        replaced(0, recurrent=torch.zeros(3, 2, 3, 4, device="meta")),
        "got (3, 2, 3, 4), torch.float32 on meta",
    ),
    "not tensors": (replaced(0, conv=[1.0]), "got <class 'list'>"),
    "a tensor": (lambda state: state[0].recurrent, "s must be a tuple with one LayerState"),
    "a dictionary": (lambda state: dict(enumerate(state)), "got dict"),
    "a list of tensors": (lambda state: [layer.recurrent for layer in state], "must be a tuple with one LayerState"),
    "three parts": (lambda state: [(*layer, layer.conv) for layer in state], "does not fit a model without a window"),
    "four parts": (lambda state: [layer * 2 for layer in state], "must be a tuple with one LayerState"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_by_layer_and_both_shapes(name: str) -> None:
    break_state, message = BAD_STATES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_state(break_state(state_of()), SHAPES, 3, CPU, torch.float32, "s")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_layer_part_and_rows(value: float) -> None:
    state = state_of()
    state[1].conv[0, 2, 1] = value
    state[1].conv[2, 0, 0] = value
    with pytest.raises(ValueError, match=r"s: layer 1, part 'conv' has NaN or infinite values in rows \[0, 2\]"):
        check_finite_state(state, "s")


@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_models_refuse_states_that_do_not_fit_before_running(family: Family) -> None:
    model = build(family)
    tokens, state = random_tokens(2, 3), random_state(model, 2)
    assert [[tuple(part.shape[1:]) for part in layer] for layer in state] == [
        list(map(tuple, s)) for s in model.state_shapes()
    ]
    nan = clone_state(state)
    nan[1].recurrent[1, 0, 0] = float("nan")
    for bad, message in (
        (state[:-1], "initial_state has 1 layers, the model has 2"),
        (take_rows(state, slice(1)), "layer 0, part 'recurrent' must be a tensor (2, "),
        (map_state(torch.Tensor.double, state), "torch.float64 on cpu"),
        (map_state(lambda part: part.to("meta"), state), "torch.float32 on meta"),
        (nan, "layer 1, part 'recurrent' has NaN or infinite values in rows [1]"),
        ("state", "must be a tuple with one LayerState"),
    ):
        for run in (model, model.base_model, model.generate):
            with pytest.raises(ValueError, match=re.escape(message)):
                run(tokens, initial_state=bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_state_is_read_back_with_its_metadata(tmp_path: Path, dtype: torch.dtype) -> None:
    state = map_state(lambda part: part.to(dtype), state_of())
    save_state(tmp_path / "s", map_state(torch.Tensor.requires_grad_, state), {"model": "a/b", "ü": '"\n'})
    loaded, metadata = load_state(tmp_path / "s")
    assert_same(loaded, state)
    assert not loaded[0].recurrent.requires_grad
    assert metadata == {"model": "a/b", "ü": '"\n'}
    assert load_state(str(tmp_path / "s"), device="cpu")[0][0].conv.dtype == dtype


def test_the_file_names_format_version_and_parts(tmp_path: Path) -> None:
    save_state(tmp_path / "s", state_of())
    with safe_open(tmp_path / "s", "pt") as file:
        fields = dict(file.metadata())
        assert fields.pop("checksum").startswith("sha256-of-fields-and-tensors:")
        assert fields == {"format": "recurrent_state", "format_version": "1", "num_layers": "2", "metadata": "{}"}
        assert sorted(file.keys()) == ["layers.0.conv", "layers.0.recurrent", "layers.1.conv", "layers.1.recurrent"]


def test_a_state_with_nan_is_not_saved(tmp_path: Path) -> None:
    state = state_of()
    save_state(tmp_path / "s", state)
    broken = keep_rows(state, torch.tensor([True, True, True]))
    broken[0].conv[1] = float("nan")
    with pytest.raises(ValueError, match=r"state: layer 0, part 'conv' has NaN .* rows \[1\]"):
        save_state(tmp_path / "s", broken)
    assert_same(load_state(tmp_path / "s")[0], state)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    save_state(tmp_path / "whole", state_of())
    content = (tmp_path / "whole").read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 4, len(content) - 1]:
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut is not a readable safetensors file .* may be cut"):
            load_state(tmp_path / "cut")


def test_a_pickle_under_this_name_is_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "it went off",))

    (tmp_path / "p.safetensors").write_bytes(pickle.dumps(Bomb()))
    torch.save({"a": torch.zeros(3)}, tmp_path / "t.safetensors")
    (tmp_path / "text.safetensors").write_text("no state")
    for name in ("p.safetensors", "t.safetensors", "text.safetensors"):
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name} is not a readable safetensors file")):
            load_state(tmp_path / name)
    assert not (tmp_path / "it went off").exists()


def good_file() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors = {f"layers.0.{name}": part for name, part in state_of()[0]._asdict().items()}
    return tensors, {"format": "recurrent_state", "format_version": "1", "num_layers": "1", "metadata": "{}"}


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        ({}, {"format": "pt"}, "has the format 'pt', version '1', and must have 'recurrent_state', 1"),
        ({}, {"format_version": "2"}, "'recurrent_state', version '2', and must have 'recurrent_state', 1: update"),
        ({}, {"num_layers": "1000000"}, "does not hold the parts of '1000000' layers"),
        ({}, {"num_layers": "2"}, "missing ['layers.1.conv', 'layers.1.recurrent']"),
        ({}, {"num_layers": "0"}, "does not hold the parts of '0' layers"),
        ({}, {"num_layers": "-1"}, "does not hold the parts of '-1' layers"),
        ({"layers.0.conv": None}, {}, "missing ['layers.0.conv']"),
        ({"weight": torch.zeros(1)}, {}, "unexpected ['weight']"),
        ({"layers.0.conv": torch.full((3, 5, 3), torch.nan)}, {}, "layer 0, part 'conv' has NaN"),
    ],
)
def test_a_file_that_is_not_a_whole_state_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], header: dict[str, str], message: str
) -> None:
    good_tensors, good_header = good_file()
    merged = {name: value for name, value in (good_tensors | tensors).items() if value is not None}
    write_tensors(tmp_path / "s", merged, good_header | header)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_state(tmp_path / "s")


def test_a_file_without_header_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_file(good_file()[0], tmp_path / "s")
    with pytest.raises(ValueError, match="has the format None, version None"):
        load_state(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "nothing")


def test_an_interrupted_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path / "s", state_of())

    def full_disk(tensors: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_on_disk, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path / "s", zero_state(SHAPES, 1))
    assert_same(load_state(tmp_path / "s")[0], state_of())
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_a_state_made_in_inference_mode_can_be_trained_from(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 9)
    with torch.inference_mode():
        state = model(tokens, output_final_state=True).final_state
        model(tokens, initial_state=state)
    assert state[0].recurrent.is_inference()
    with torch.no_grad():
        expected = model(tokens, output_final_state=True).final_state
    losses = []
    for start in (state, expected):
        model.zero_grad()
        loss = model(tokens, labels=tokens, initial_state=start).loss
        loss.backward()
        losses.append(loss.item())
        assert all(parameter.grad is not None for parameter in model.get_input_embeddings().parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
