"""Packing: every token of the stream is in exactly one block, and evaluation sequences do not overlap."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_recurrent_lengthgen.data import PackedBlocks, evaluation_sequences


def items(blocks: PackedBlocks) -> list[dict[str, Tensor]]:
    return [blocks[index] for index in range(len(blocks))]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32, np.uint64, np.int64])
def test_tokens_of_any_size_give_the_same_rows(dtype: Any) -> None:
    stream, expected = np.arange(9).astype(dtype), PackedBlocks(torch.arange(9), 2)
    stream.flags.writeable = False
    blocks = PackedBlocks(stream, 2)
    assert [block["labels"].tolist() for block in items(blocks)] == [b["labels"].tolist() for b in items(expected)]
    assert blocks[0]["input_ids"].dtype == torch.int64
    assert blocks.resume_record == expected.resume_record
    found = evaluation_sequences(stream, 2, 3)
    assert found.dtype == torch.int64
    assert found.tolist() == [[0, 1, 2], [6, 7, 8]]


@given(size=st.integers(2, 300), length=st.integers(1, 40))
@settings(max_examples=200)
def test_no_token_is_lost_or_doubled(size: int, length: int) -> None:
    stream = torch.arange(size) * 7 + 3
    if size < length + 1:
        with pytest.raises(ValueError, match="give more data"):
            PackedBlocks(stream, length)
        return
    blocks = PackedBlocks(stream, length)
    kept = [token for block in items(blocks) for token in block["input_ids"].tolist()]
    assert kept == stream[: len(kept)].tolist()
    assert size - len(kept) <= length
    for block in items(blocks):
        assert all(tensor.shape == (length + 1,) for tensor in block.values())
        assert torch.equal(block["labels"], block["input_ids"])


@pytest.mark.parametrize(
    ("stream", "length", "message"),
    [
        (torch.arange(5), 5, "has 5 tokens, but a block of length 5 needs 6"),
        (torch.arange(0), 1, "has 0 tokens"),
        (torch.zeros(2, 5, dtype=torch.int64), 1, r"\(2, 5\)"),
        (
            torch.zeros(5),
            1,
            r"float32, but must be one-dimensional and of integers, such as int64 or uint16; use",
        ),
        (torch.zeros(5, dtype=torch.bool), 1, "bool"),
    ],
)
def test_unusable_packing_is_refused(stream: Tensor, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBlocks(stream, length)


@given(count=st.integers(1, 20), length=st.integers(2, 20), spare=st.integers(0, 100))
@settings(max_examples=200)
def test_evaluation_sequences_never_overlap_and_are_evenly_spaced(count: int, length: int, spare: int) -> None:
    stream = torch.arange(count * length + spare)
    sequences = evaluation_sequences(stream, count, length)
    assert sequences.shape == (count, length)
    assert bool((sequences.diff(dim=1) == 1).all())
    assert len(set(sequences.flatten().tolist())) == count * length
    gaps = sequences[:, 0].diff().tolist()
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert sequences[0, 0] == 0
    assert count == 1 or sequences[-1, -1] == stream[-1]


def test_evaluation_longer_than_the_data_says_what_fits() -> None:
    message = "3 sequences of 40 tokens need 120, the data has 100: 2 sequences of 40 .* or 3 sequences of 33"
    with pytest.raises(ValueError, match=message):
        evaluation_sequences(torch.arange(100), 3, 40)
