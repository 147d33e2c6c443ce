"""A token stream cut into training blocks and into evaluation sequences."""

from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED_LABEL = -100  # cross-entropy's ignore_index in torch and Transformers


class PackedBlocks(Dataset[dict[str, Tensor]]):
    """Disjoint blocks of T + 1 tokens of one stream, so T predictions each; item i is block i.

    An item is `{"input_ids": (T + 1,), "labels": (T + 1,)}`, int64; the model shifts the labels, as usual in
    Transformers. Items of full blocks are views of the stream: copy before writing into one (collators do).

    Args:
        stream: (number of tokens,) int64.
        length: T, the number of predictions per block, at least 1.
        tail: what becomes of the tokens after the last full block. "drop" leaves them out. "pad" makes a last
            block of them, padded on the right with label -100, and gives every item an "attention_mask"
            (T + 1,) int64. A tail of one token predicts nothing, its mean loss is 0 / 0: always dropped.
        pad_token_id: the id in padded places.

    Attributes:
        length: T.
        dropped_tokens: tokens at the end of the stream that are in no block.

    Raises:
        ValueError: a stream that is not one row of int64, too short for one block, or a wrong length or tail.
    """

    def __init__(
        self, stream: Tensor, length: int, tail: Literal["drop", "pad"] = "drop", pad_token_id: int = 0
    ) -> None:
        _check_stream(stream)
        if length < 1:
            raise ValueError(f"length is {length}, but a block needs at least 1 prediction")
        if tail not in ("drop", "pad"):
            raise ValueError(f"tail is {tail!r}, but must be 'drop' or 'pad'")
        size = length + 1
        number_of_blocks, rest = divmod(len(stream), size)
        self.length = length
        self._blocks = stream[: number_of_blocks * size].view(number_of_blocks, size)
        self._padded: dict[str, Tensor] | None = None
        self._full_mask = torch.ones(size, dtype=torch.int64) if tail == "pad" else None
        self.dropped_tokens = rest
        if tail == "pad" and rest > 1:
            self.dropped_tokens = 0
            self._padded = _padded_block(stream[-rest:], size, pad_token_id)
        if not len(self):
            needed = size if tail == "drop" else 2
            raise ValueError(
                f"the stream has {len(stream)} tokens, but a block of length {length} needs {needed} "
                f"with tail={tail!r}; give more data or a smaller length"
            )

    def __len__(self) -> int:
        return len(self._blocks) + (self._padded is not None)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        index %= len(self)
        if index == len(self._blocks):
            assert self._padded is not None
            return dict(self._padded)
        block = self._blocks[index]
        item = {"input_ids": block, "labels": block}
        if self._full_mask is not None:
            item["attention_mask"] = self._full_mask
        return item


def evaluation_sequences(stream: Tensor, count: int, length: int) -> Tensor:
    """`count` evenly spaced sequences of `length` tokens that do not overlap, first to last token.

    Sequence i starts at i (n - length) / (count - 1) of n tokens, rounded down; a single one starts at 0.

    Args:
        stream: (n,) int64, usually the validation stream.
        count: number of sequences, at least 1.
        length: tokens per sequence, at least 2 (one prediction).

    Returns:
        (count, length) int64, a copy.

    Raises:
        ValueError: they do not fit into the stream (says what would), or a count or length that is too small.
    """
    _check_stream(stream)
    if count < 1 or length < 2:
        raise ValueError(f"count is {count}, length {length}; at least 1 sequence of 2 tokens is needed")
    number_of_tokens = len(stream)
    if count * length > number_of_tokens:
        raise ValueError(
            f"{count} sequences of {length} tokens need {count * length}, the data has {number_of_tokens}: "
            f"{number_of_tokens // length} sequences of {length} tokens would fit, "
            f"or {count} sequences of {number_of_tokens // count}"
        )
    spare = number_of_tokens - length
    starts = [index * spare // max(count - 1, 1) for index in range(count)]
    return torch.stack([stream[start : start + length] for start in starts])


def _check_stream(stream: Tensor) -> None:
    if stream.ndim != 1 or stream.dtype != torch.int64:
        raise ValueError(
            f"stream is {tuple(stream.shape)} {stream.dtype}, but must be one row of int64; use token_stream"
        )


def _padded_block(tokens: Tensor, size: int, pad_token_id: int) -> dict[str, Tensor]:
    fill = size - len(tokens)
    ones = torch.ones_like(tokens)
    return {
        "input_ids": torch.nn.functional.pad(tokens, (0, fill), value=pad_token_id),
        "labels": torch.nn.functional.pad(tokens, (0, fill), value=IGNORED_LABEL),
        "attention_mask": torch.nn.functional.pad(ones, (0, fill)),
    }
