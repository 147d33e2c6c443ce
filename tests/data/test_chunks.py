"""Rows cut into chunks, which together have every token and target once, and packed rows into their sequences."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.data.chunks import sequence_shard
from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.models.rows import Rows


def rows(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (3, length), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(3, length, generator=generator) < 0.3, -100)}


def joined(inputs: dict[str, Any], size: int, name: str) -> Tensor:
    return torch.cat([sequence_shard(inputs, rank, size)[name] for rank in range(size)], dim=1)


@settings(max_examples=40)
@given(length=st.integers(4, 40), size=st.integers(1, 4), seed=st.integers(0, 10))
def test_tokens_and_targets_are_there_once(length: int, size: int, seed: int) -> None:
    inputs = rows(length, seed)
    assert torch.equal(joined(inputs, size, "input_ids"), inputs["input_ids"])
    assert torch.equal(joined(inputs, size, "shift_labels"), pad(inputs["labels"][:, 1:], (0, 1), value=-100))
    lengths = {sequence_shard(inputs, rank, size)["input_ids"].shape[1] for rank in range(size)}
    assert max(lengths) - min(lengths) <= 1


def test_packed_rows_count_sequences_over_the_chunks() -> None:
    inputs = rows(8, 0) | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 3)}
    assert joined(inputs, 3, "seq_idx").tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]] * 3
    assert bool((joined(inputs, 3, "shift_labels")[:, 2] == -100).all())  # nothing predicts the next sequence
    assert "position_ids" not in sequence_shard(inputs, 0, 3)


def test_padding_has_no_targets_and_states_pass() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1] * 6])
    inputs = rows(6, 1)
    inputs |= {"labels": inputs["input_ids"].masked_fill(mask == 0, -100), "attention_mask": mask}
    targets = joined(inputs, 2, "shift_labels")
    assert targets[0].tolist() == [-100, -100, *inputs["input_ids"][0, 3:].tolist(), -100]
    state = ((torch.zeros(3, 1), torch.zeros(3, 1)),)
    assert sequence_shard(inputs | {"initial_state": state}, 1, 2)["initial_state"] is state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "Sequences of 2 tokens cannot be split over 3 processes"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"labels must have one target for each token, \(3, 9\)"),
        ({"weights": torch.ones(3, 9)}, r"\['weights'\] cannot be cut into chunks"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]] * 3), "labels": torch.ones(3, 9).long()},
            "Row 0 has padding inside, at position 3, .* the token after it is a target",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequence_shard(rows(9 if change else 2, 0) | change, 1, 3)


def test_packed_rows_become_rows_of_one_sequence_each() -> None:
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
def test_what_cannot_be_unpacked_is_refused(extra: dict[str, Tensor], message: str) -> None:
    starts = torch.tensor([[False, False, True], [False, False, False]])
    with pytest.raises(ValueError, match=message):
        unpacked({"input_ids": torch.zeros(2, 3).long(), **extra}, Rows((2, 3), starts=starts))


def test_padding_stays_padding_in_the_row_of_its_sequence() -> None:
    ids = torch.arange(1, 7)[None]
    real, starts = torch.tensor([[0, 1, 1, 0, 1, 0]]).bool(), torch.tensor([[0, 0, 0, 0, 1, 0]]).bool()
    found = unpacked({"input_ids": ids}, Rows((1, 6), real=real, starts=starts))
    assert found["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert found["attention_mask"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
