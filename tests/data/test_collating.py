"""Rows of several lengths as one batch, as the collator of Transformers pads them with a tokenizer."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, default_data_collator

from hf_recurrent_lengthgen.data import PaddingCollator, byte_tokenizer

ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]


@pytest.mark.parametrize("ids", [list, torch.tensor, np.int16, np.uint16])
def test_rows_are_padded_as_by_transformers(ids: Any) -> None:
    labels = np.int16 if ids is np.uint16 else ids  # which has no -100
    rows = [{"input_ids": ids(row["input_ids"]), "labels": labels(row["labels"])} for row in ROWS]
    batch = PaddingCollator()(rows)
    expected = DataCollatorForSeq2Seq(byte_tokenizer())([dict(row) for row in ROWS])  # its pad token is 0
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert batch[name].tolist() == value.tolist(), name
        assert batch[name].dtype == torch.int64


def test_rows_of_one_length_are_stacked() -> None:
    rows = [{"input_ids": [1, 2], "labels": 3}, {"input_ids": [4, 5], "labels": 6}]
    batch, expected = PaddingCollator()(rows), default_data_collator(rows)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_an_own_mask_is_kept_and_unknown_values_are_refused() -> None:
    rows = [{"input_ids": [5, 6], "attention_mask": [0, 1]}, {"input_ids": [7], "attention_mask": [1]}]
    assert PaddingCollator()(rows)["attention_mask"].tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="'weights' of sequences of several lengths cannot be padded: leave it out"):
        PaddingCollator()([{**row, "weights": row["input_ids"]} for row in rows])
