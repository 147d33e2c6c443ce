"""Packed rows as rows of one sequence each."""

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.models.rows import Rows


def test_rows_by_hand() -> None:
    inputs = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "labels": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "shift_labels": torch.tensor([[2, -100, 4, 5], [-100, 7, 8, 9]]),
        "output_final_state": True,
    }
    starts = torch.tensor([[False, False, True, False], [False, True, False, False]])
    cut = unpacked(inputs, Rows((2, 4), starts=starts))
    assert {name: getattr(value, "tolist", lambda v=value: v)() for name, value in cut.items()} == {
        "input_ids": [[1, 2, 0], [3, 4, 0], [5, 0, 0], [6, 7, 8]],
        "labels": [[1, 2, -100], [3, 4, -100], [5, -100, -100], [6, 7, 8]],
        "shift_labels": [[2, -100, -100], [4, 5, -100], [-100, -100, -100], [7, 8, 9]],
        "attention_mask": [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 1]],
        "output_final_state": True,
    }
    assert cut["attention_mask"].dtype == torch.int64
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert "attention_mask" not in inputs


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"inputs_embeds": torch.ones(2, 3, 4)}, r"inputs\['inputs_embeds'\] \(2, 3, 4\) cannot be cut"),
        ({"labels": torch.ones(2, 4)}, r"inputs\['labels'\] \(2, 4\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(extra: dict[str, Tensor], message: str) -> None:
    starts = torch.tensor([[False, False, True], [False, False, False]])
    with pytest.raises(ValueError, match=message):
        unpacked({"input_ids": torch.zeros(2, 3).long(), **extra}, Rows((2, 3), starts=starts))


def test_padding_stays_padding_in_the_row_of_its_sequence() -> None:
    ids = torch.arange(1, 7)[None]
    real, starts = torch.tensor([[0, 1, 1, 0, 1, 0]]).bool(), torch.tensor([[0, 0, 0, 0, 1, 0]]).bool()
    found = unpacked({"input_ids": ids}, Rows((1, 6), real=real, starts=starts))
    assert found["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert found["attention_mask"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
