"""Pieces of rows: together they have every token and every target once, in their order."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.data.pieces import piece_of_rows


def rows(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (3, length), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(3, length, generator=generator) < 0.3, -100)}


def joined(inputs: dict[str, Any], size: int, name: str) -> Tensor:
    return torch.cat([piece_of_rows(inputs, rank, size)[name] for rank in range(size)], dim=1)


@settings(max_examples=40)
@given(length=st.integers(4, 40), size=st.integers(1, 4), seed=st.integers(0, 10))
def test_tokens_and_targets_are_there_once(length: int, size: int, seed: int) -> None:
    inputs = rows(length, seed)
    assert torch.equal(joined(inputs, size, "input_ids"), inputs["input_ids"])
    assert torch.equal(joined(inputs, size, "shift_labels"), pad(inputs["labels"][:, 1:], (0, 1), value=-100))
    lengths = {piece_of_rows(inputs, rank, size)["input_ids"].shape[1] for rank in range(size)}
    assert max(lengths) - min(lengths) <= 1


def test_packed_rows_count_sequences_over_the_pieces() -> None:
    inputs = rows(8, 0) | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 3)}
    assert joined(inputs, 3, "seq_idx").tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]] * 3
    assert bool((joined(inputs, 3, "shift_labels")[:, 2] == -100).all())  # nothing predicts the next sequence
    assert "position_ids" not in piece_of_rows(inputs, 0, 3)


def test_padding_has_no_targets_and_states_pass() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1] * 6])
    inputs = rows(6, 1)
    inputs |= {"labels": inputs["input_ids"].masked_fill(mask == 0, -100), "attention_mask": mask}
    targets = joined(inputs, 2, "shift_labels")
    assert targets[0].tolist() == [-100, -100, *inputs["input_ids"][0, 3:].tolist(), -100]
    state = ((torch.zeros(3, 1), torch.zeros(3, 1)),)
    assert piece_of_rows(inputs | {"initial_state": state}, 1, 2)["initial_state"] is state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "Rows of 2 tokens cannot be shared by 3 processes"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"labels must have one target for each token, \(3, 9\)"),
        ({"weights": torch.ones(3, 9)}, r"\['weights'\] cannot be cut into pieces"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]] * 3), "labels": torch.ones(3, 9).long()},
            "Row 0 has padding inside, at position 3, .* the token after it is a target",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        piece_of_rows(rows(9 if change else 2, 0) | change, 1, 3)
