"""Sources of initial states, with states written by hand."""

import pytest
import torch

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers import BatchPlace, PassedStates
from tests.trainers import toys

CPU = torch.device("cpu")


def state(*values: float) -> RecurrentState:
    """Two layers; row i is `values[i]` everywhere, the second layer ten times that; the first has no conv part."""
    rows = torch.tensor(values)[:, None]
    return LayerState(rows.repeat(1, 3), rows[:, :0]), LayerState(10 * rows.repeat(1, 2), 10 * rows)


def place(step: int = 0, micro_batch: int = 0, rows: int = 2, first_row: int = 0, seed: int = 0) -> BatchPlace:
    return BatchPlace(seed, step, micro_batch, first_row, rows)


def starts(source: PassedStates, at: BatchPlace) -> list[float]:
    given = source.initial_state(at)
    assert given is not None
    return given[0].recurrent[:, 0].tolist()


def test_each_slot_carries_its_own_states() -> None:
    source = PassedStates(drop_probability=0.0)
    source.observe(place(micro_batch=0), state(1.0, 2.0))
    assert source.initial_state(place(micro_batch=1)) is None
    source.observe(place(micro_batch=1), state(3.0, 4.0))
    assert starts(source, place(1, micro_batch=0)) == [1.0, 2.0]
    assert starts(source, place(1, micro_batch=1)) == [3.0, 4.0]


def test_a_smaller_batch_uses_and_replaces_its_first_rows_only() -> None:
    source = PassedStates(drop_probability=0.0)
    source.observe(place(rows=3), state(1.0, 2.0, 3.0))
    assert starts(source, place(1, rows=1)) == [1.0]
    source.observe(place(1, rows=1), state(9.0))
    assert starts(source, place(2, rows=3)) == [9.0, 2.0, 3.0]


def test_rows_without_a_state_start_from_zero() -> None:
    source = PassedStates(drop_probability=0.0)
    source.observe(place(rows=1), state(5.0))
    torch.testing.assert_close(source.initial_state(place(1, rows=3)), state(5.0, 0.0, 0.0), rtol=0, atol=0)


def test_dropped_rows_are_those_of_the_hand_computed_key() -> None:
    source = PassedStates(drop_probability=0.4)
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    source.observe(place(rows=8), state(*values))
    dropped = 0
    for step in range(1, 30):
        kept = [0.0 if toys.is_dropped(0, step, 0, row, 0.4) else values[row] for row in range(8)]
        torch.testing.assert_close(source.initial_state(place(step, rows=8)), state(*kept), rtol=0, atol=0)
        dropped += kept.count(0.0)
    assert abs(dropped / 232 - 0.4) < 0.1  # three standard deviations


def test_choices_do_not_depend_on_how_rows_are_spread_over_processes() -> None:
    together = place(4, rows=4).uniform("drop")
    apart = torch.cat([place(4, rows=2, first_row=first).uniform("drop") for first in (0, 2)])
    assert torch.equal(together, apart)


@pytest.mark.parametrize(("probability", "expected"), [(0.0, [1.0, 2.0]), (1.0, [0.0, 0.0])])
def test_probabilities_zero_and_one_are_exact(probability: float, expected: list[float]) -> None:
    source = PassedStates(probability)
    source.observe(place(), state(1.0, 2.0))
    assert all(starts(source, place(step)) == expected for step in range(1, 50))


def test_the_convolution_part_can_be_left_behind() -> None:
    source = PassedStates(drop_probability=0.0, carry_conv_state=False)
    source.observe(place(), state(1.0, 2.0))
    given = source.initial_state(place(1))
    assert given is not None
    assert given[1].recurrent.tolist() == [[10.0, 10.0], [20.0, 20.0]]
    assert given[1].conv.tolist() == [[0.0], [0.0]]


def test_carried_states_take_no_memory_but_their_own() -> None:
    """A state in its own memory is kept as it is, without its graph; a slice of something larger is copied."""
    whole = torch.ones(2, 3, requires_grad=True) * 2
    inputs = torch.ones(2, 50)
    source = PassedStates(drop_probability=0.0)
    source.observe(place(), (LayerState(whole, inputs[:, -4:]),))
    layer = next(iter(source._carried.values()))[0]
    assert not layer.recurrent.requires_grad
    assert layer.recurrent.data_ptr() == whole.data_ptr()
    assert layer.conv.untyped_storage().nbytes() == 2 * 4 * 4
    given = source.initial_state(place(1))
    assert given is not None
    given[0].recurrent.fill_(8.0)
    assert starts(source, place(1)) == [2.0, 2.0]


def test_a_dropped_row_is_zero_even_where_its_state_is_nan() -> None:
    source = PassedStates(drop_probability=1.0)
    source.observe(place(), state(float("nan"), 1.0))
    assert starts(source, place(1)) == [0.0, 0.0]


def test_reset_forgets_all_states() -> None:
    source = PassedStates()
    source.observe(place(), state(1.0, 2.0))
    source.reset()
    assert source.initial_state(place(1)) is None
    assert source.state_dict() == {}


def test_state_dict_gives_the_states_back() -> None:
    source = PassedStates(drop_probability=0.0)
    source.observe(place(micro_batch=0), state(1.0, 2.0))
    source.observe(place(micro_batch=2), state(3.0, 4.0))
    tensors = source.state_dict()
    assert tensors["micro_batches.2.layers.1.conv"].tolist() == [[30.0], [40.0]]
    assert len(tensors) == 8
    copy = PassedStates(drop_probability=0.0)
    copy.load_state_dict(tensors, CPU)
    for micro_batch in (0, 2):
        torch.testing.assert_close(
            copy.initial_state(place(1, micro_batch)), source.initial_state(place(1, micro_batch)), rtol=0, atol=0
        )
    assert copy.initial_state(place(1, micro_batch=1)) is None
