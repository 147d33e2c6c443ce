"""Sequences of several lengths as one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .packing import IGNORED_LABEL

PADDING_ID = 0
FILL = {"input_ids": PADDING_ID, "attention_mask": 0, "labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}
"""What stands at padding."""


class PaddingCollator:
    """Collates sequences into a batch, padded on the right to the longest, without a tokenizer or a pad token.

    Token ids are padded with 0 and labels with -100; integers of all sizes become int64. Where lengths differ, the
    batch has an `attention_mask`, 1 at real tokens. Numbers, such as the label of a whole sequence, are stacked.
    """

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Tensors (B, T), and (B,) of numbers, from items with `input_ids` (T,), as tensors or lists.

        Raises:
            ValueError: for values of several lengths whose padding is not known.
        """
        rows = [{name: _as_tensor(value) for name, value in item.items()} for item in items]
        if len({len(row["input_ids"]) for row in rows}) > 1:
            rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
        return {name: _together(name, [row[name] for row in rows]) for name in rows[0]}


def _as_tensor(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


def _together(name: str, parts: list[Tensor]) -> Tensor:
    if len({part.shape for part in parts}) == 1:
        return torch.stack(parts)
    if name not in FILL:
        raise ValueError(
            f"{name!r} of sequences of several lengths cannot be padded: leave it out, or write a data_collator. "
            f"What is padded is {', '.join(FILL)}."
        )
    return torch.nn.utils.rnn.pad_sequence(parts, True, FILL[name])
