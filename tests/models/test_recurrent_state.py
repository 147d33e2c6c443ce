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


def numbered_state(rows: int = 3) -> RecurrentState:
    """Every entry of layer l is row + 1 + 10 l in the recurrent part, and the negative of it in the other."""
    layers = []
    for index, shape in enumerate(SHAPES):
        row = torch.arange(1.0, rows + 1) + 10 * index
        layers.append(
            LayerState(
                row.view(-1, 1, 1, 1).expand(rows, *shape.recurrent).clone(),
                -row.view(-1, 1, 1).expand(rows, *shape.conv).clone(),
            )
        )
    return tuple(layers)


def row_values(state: RecurrentState) -> list[list[float]]:
    """Value of each row and part, which must be constant in the row."""
    assert all(bool((part.flatten(1) == part.flatten(1)[:, :1]).all()) for layer in state for part in layer)
    return [part.flatten(1)[:, 0].tolist() for layer in state for part in layer]


def assert_same(state: RecurrentState, other: RecurrentState) -> None:
    assert len(state) == len(other)
    for layer, other_layer in zip(state, other, strict=True):
        assert isinstance(layer, LayerState)
        assert all(torch.equal(a, b) for a, b in zip(layer, other_layer, strict=True))


def test_the_zero_state_has_the_shapes_rows_and_dtype_asked_for() -> None:
    state = zero_state(SHAPES, 7, dtype=torch.float64)
    assert [[tuple(part.shape) for part in layer] for layer in state] == [[(7, 2, 3, 4), (7, 5, 3)]] * 2
    assert all(part.dtype == torch.float64 and not part.any() for layer in state for part in layer)
    assert state_batch_size(state) == 7
    assert zero_state(SHAPES, 1)[0].conv.dtype == torch.float32


@pytest.mark.parametrize(
    ("model_dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_states_are_never_narrower_than_float32(model_dtype: torch.dtype, expected: torch.dtype) -> None:
    assert state_dtype(model_dtype) == expected


def test_rows_are_taken_in_the_order_given() -> None:
    assert row_values(take_rows(numbered_state(), torch.tensor([2, 0, 2]))) == [
        [3, 1, 3],
        [-3, -1, -3],
        [13, 11, 13],
        [-13, -11, -13],
    ]
    assert row_values(take_rows(numbered_state(), slice(1, None)))[0] == [2, 3]


def test_rows_are_kept_by_mask_and_the_others_become_zero_even_from_nan() -> None:
    state = numbered_state()
    state[0].recurrent[1] = float("nan")
    state[1].conv[1] = float("inf")
    kept = keep_rows(state, torch.tensor([True, False, True]))
    assert row_values(kept) == [[1, 0, 3], [-1, 0, -3], [11, 0, 13], [-11, 0, -13]]


def test_gradients_of_dropped_rows_are_zero_even_from_nan() -> None:
    state = map_state(torch.Tensor.requires_grad_, numbered_state())
    kept = keep_rows(state, torch.tensor([True, False, True]))
    sum((part * part).sum() for layer in kept for part in layer).backward()
    assert state[0].recurrent.grad is not None
    assert [float(row.sum()) for row in state[0].recurrent.grad] == [24 * 2 * 1, 0, 24 * 2 * 3]


@pytest.mark.parametrize(
    "mask", [torch.tensor([1, 0, 1]), torch.tensor([True, False]), torch.tensor([[True, False, True]])]
)
def test_a_mask_that_is_none_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"boolean tensor of shape \(3,\), got"):
        keep_rows(numbered_state(), mask)


def test_rows_of_several_states_are_stacked() -> None:
    state = numbered_state()
    stacked = concatenate_rows([take_rows(state, slice(2, 3)), state])
    assert row_values(stacked)[0] == [3, 1, 2, 3]
    assert all(isinstance(layer, LayerState) for layer in stacked)


def test_only_the_convolution_part_is_zeroed() -> None:
    assert row_values(zero_conv(numbered_state())) == [[1, 2, 3], [0, 0, 0], [11, 12, 13], [0, 0, 0]]


FUNCTIONS: dict[str, Callable[[RecurrentState], object]] = {
    "detach_state": detach_state,
    "clone_state": clone_state,
    "state_to": lambda state: state_to(state, "cpu"),
    "take_rows": lambda state: take_rows(state, torch.tensor([1, 0])),
    "keep_rows": lambda state: keep_rows(state, torch.tensor([True, False, True])),
    "concatenate_rows": lambda state: concatenate_rows([state, state]),
    "zero_conv": zero_conv,
    "check_state": lambda state: check_state(state, SHAPES, 3, CPU, torch.float32),
    "check_finite_state": check_finite_state,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_changes_the_state_it_is_given(name: str) -> None:
    state = numbered_state()
    FUNCTIONS[name](state)
    assert_same(state, numbered_state())


def test_a_clone_has_its_own_memory_and_keeps_gradients_and_a_detached_state_keeps_neither_history() -> None:
    state = map_state(torch.Tensor.requires_grad_, numbered_state())
    clone = clone_state(state)
    assert clone[0].recurrent.data_ptr() != state[0].recurrent.data_ptr()
    assert clone[0].recurrent.requires_grad
    assert not any(part.requires_grad for layer in detach_state(state) for part in layer)
    assert_same(detach_state(state), numbered_state())


def replaced(layer: int, **parts: Any) -> Callable[[RecurrentState], Any]:
    return lambda state: (*state[:layer], state[layer]._replace(**parts), *state[layer + 1 :])


BAD_STATES: dict[str, tuple[Callable[[RecurrentState], Any], str]] = {
    "too few layers": (lambda state: state[:1], "s has 1 layers, the model has 2"),
    "too many layers": (lambda state: (*state, *state), "s has 4 layers, the model has 2"),
    "recurrent shape": (
        replaced(1, recurrent=torch.zeros(3, 2, 4, 3)),
        "layer 1, part 'recurrent' has shape (3, 2, 4, 3), expected (3, 2, 3, 4)",
    ),
    "conv of K columns": (
        replaced(0, conv=torch.zeros(3, 5, 4)),
        "layer 0, part 'conv' has shape (3, 5, 4), expected (3, 5, 3)",
    ),
    "rows": (
        lambda state: take_rows(state, slice(2)),
        "layer 0, part 'recurrent' has shape (2, 2, 3, 4), expected (3, 2, 3, 4) (batch of 3 rows first)",
    ),
    "dtype": (
        replaced(1, conv=torch.zeros(3, 5, 3, dtype=torch.bfloat16)),
        "layer 1, part 'conv' has dtype torch.bfloat16, expected torch.float32",
    ),
    "device": (
        replaced(0, recurrent=torch.zeros(3, 2, 3, 4, device="meta")),
        "layer 0, part 'recurrent' is on meta, the inputs are on cpu",
    ),
    "not tensors": (replaced(0, conv=[1.0]), "layer 0, part 'conv' must be a tensor, got list"),
    "none": (replaced(1, conv=None), "layer 1, part 'conv' must be a tensor, got NoneType"),
    "a tensor": (lambda state: state[0].recurrent, "s must be a tuple with one LayerState"),
    "a dictionary": (lambda state: dict(enumerate(state)), "got dict"),
    "a list of tensors": (lambda state: [layer.recurrent for layer in state], "must be a tuple with one LayerState"),
    "three parts": (lambda state: [(*layer, layer.conv) for layer in state], "does not fit a model without a window"),
    "four parts": (lambda state: [layer * 2 for layer in state], "must be a tuple with one LayerState"),
    "a single layer": (lambda state: state[0], "must be a tuple with one LayerState"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_by_layer_and_both_shapes(name: str) -> None:
    break_state, message = BAD_STATES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_state(break_state(numbered_state()), SHAPES, 3, CPU, torch.float32, "s")


def test_plain_tuples_and_lists_are_taken_and_become_layer_states() -> None:
    state = numbered_state()
    plain = [list(layer) for layer in state]
    assert_same(check_state(plain, SHAPES, 3, CPU, torch.float32), state)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_layer_part_and_rows(value: float) -> None:
    state = numbered_state()
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
        (take_rows(state, slice(1)), "layer 0, part 'recurrent' has shape (1, "),
        (map_state(torch.Tensor.double, state), "has dtype torch.float64, expected torch.float32"),
        (map_state(lambda part: part.to("meta"), state), "is on meta, the inputs are on cpu"),
        (nan, "layer 1, part 'recurrent' has NaN or infinite values in rows [1]"),
        ("state", "must be a tuple with one LayerState"),
    ):
        for run in (model, model.base_model, model.generate):
            with pytest.raises(ValueError, match=re.escape(message)):
                run(tokens, initial_state=bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_state_is_read_back_with_its_metadata(tmp_path: Path, dtype: torch.dtype) -> None:
    state = map_state(lambda part: part.to(dtype), numbered_state())
    save_state(tmp_path / "s", map_state(torch.Tensor.requires_grad_, state), {"model": "a/b", "ü": '"\n'})
    loaded, metadata = load_state(tmp_path / "s")
    assert_same(loaded, state)
    assert not loaded[0].recurrent.requires_grad
    assert metadata == {"model": "a/b", "ü": '"\n'}
    assert load_state(str(tmp_path / "s"), device="cpu")[0][0].conv.dtype == dtype


def test_views_empty_parts_and_shared_memory_are_saved_as_they_look(tmp_path: Path) -> None:
    recurrent = torch.arange(24.0).reshape(2, 3, 4)
    state = (LayerState(recurrent.mT[:1], torch.zeros(1, 0)), LayerState(recurrent[:1], recurrent[:1]))
    save_state(tmp_path / "s", state)
    assert_same(load_state(tmp_path / "s")[0], state)


def test_the_file_names_format_version_and_parts(tmp_path: Path) -> None:
    save_state(tmp_path / "s", numbered_state())
    with safe_open(tmp_path / "s", "pt") as file:
        fields = dict(file.metadata())
        assert fields.pop("checksum").startswith("sha256-of-fields-and-tensors:")
        assert fields == {"format": "recurrent_state", "format_version": "1", "num_layers": "2", "metadata": "{}"}
        assert sorted(file.keys()) == ["layers.0.conv", "layers.0.recurrent", "layers.1.conv", "layers.1.recurrent"]


def test_a_state_with_nan_is_not_saved(tmp_path: Path) -> None:
    state = numbered_state()
    save_state(tmp_path / "s", state)
    broken = keep_rows(state, torch.tensor([True, True, True]))
    broken[0].conv[1] = float("nan")
    with pytest.raises(ValueError, match=r"state: layer 0, part 'conv' has NaN .* rows \[1\]"):
        save_state(tmp_path / "s", broken)
    assert_same(load_state(tmp_path / "s")[0], state)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    save_state(tmp_path / "whole", numbered_state())
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
    tensors = {f"layers.0.{name}": part for name, part in numbered_state()[0]._asdict().items()}
    return tensors, {"format": "recurrent_state", "format_version": "1", "num_layers": "1", "metadata": "{}"}


def test_the_hand_made_file_is_good(tmp_path: Path) -> None:
    tensors, header = good_file()
    write_tensors(tmp_path / "s", tensors, header)
    assert_same(load_state(tmp_path / "s")[0], numbered_state()[:1])


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        ({}, {"format": "pt"}, "holds no recurrent state: its format is 'pt'"),
        ({}, {"format_version": "2"}, "state format version '2', this code reads up to 1"),
        ({}, {"format_version": "first"}, "state format version 'first'"),
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
    with pytest.raises(ValueError, match="holds no recurrent state: its format is None"):
        load_state(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "nothing")


def test_an_interrupted_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path / "s", numbered_state())

    def full_disk(tensors: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_on_disk, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path / "s", zero_state(SHAPES, 1))
    assert_same(load_state(tmp_path / "s")[0], numbered_state())
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
