"""A token stream cut into training blocks and into evaluation sequences."""

import hashlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.models.modeling_heads import IGNORED_LABEL as IGNORED_LABEL


class PackedBlocks(Dataset[dict[str, Tensor]]):
    """Disjoint blocks of T + 1 tokens of one stream, so with T predictions each; item i is block i.

    An item is `{"input_ids": (T + 1,), "labels": (T + 1,)}`, int64; the model shifts the labels, as usual in
    Transformers. Items of int64 are views of the stream, so copy before writing into one (collators do). Tokens after
    the last full block are left out.

    Args:
        stream: (number of tokens,) integers of any size, also in a file (see `as_stream`).
        length: T, the number of predictions per block, at least 1.

    Raises:
        ValueError: for a stream that is not one-dimensional and of integers, or is too short for one block.
    """

    def __init__(self, stream: Tensor | np.ndarray, length: int) -> None:
        stream = as_stream(stream)
        if len(stream) <= length:
            raise ValueError(
                f"the stream has {len(stream)} tokens, but a block of length {length} needs {length + 1}; "
                "give more data or a smaller length"
            )
        self.length = length
        blocks = len(stream) // (length + 1)
        self._blocks = stream[: blocks * (length + 1)].view(blocks, length + 1)

    @property
    def resume_record(self) -> dict[str, Any]:
        """JSON values that identify the blocks; a resumed run must have the same."""
        return {"length": self.length, "tokens": self._blocks.numel(), "digest": sampled_digest(self._blocks.view(-1))}

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self._blocks[index].long()
        return {"input_ids": block, "labels": block}


def sampled_digest(stream: Tensor) -> str:
    """A digest of about 4,096 tokens, evenly spaced; the same for equal tokens of any integer dtype."""
    sample = stream[:: max(1, len(stream) // 4096)].long()
    return hashlib.blake2b(sample.numpy().tobytes(), digest_size=8).hexdigest()


def evaluation_sequences(stream: Tensor | np.ndarray, count: int, length: int) -> Tensor:
    """`count` evenly spaced sequences of `length` tokens that do not overlap, from the first to the last token.

    Sequence i starts at i (n - length) / (count - 1) of n tokens, rounded down; a single one starts at 0.

    Args:
        stream: (n,) integers of any size, usually the validation stream.
        count: Number of sequences, at least 1.
        length: Tokens per sequence, at least 2 (one prediction).

    Returns:
        (count, length) int64, a copy.

    Raises:
        ValueError: if they do not fit into the stream.
    """
    stream = as_stream(stream)
    number_of_tokens = len(stream)
    if count * length > number_of_tokens:
        raise ValueError(
            f"{count} sequences of {length} tokens need {count * length}, the data has {number_of_tokens}: "
            f"{number_of_tokens // length} sequences of {length} tokens would fit, "
            f"or {count} sequences of {number_of_tokens // count}"
        )
    spare = number_of_tokens - length
    starts = [index * spare // max(count - 1, 1) for index in range(count)]
    return torch.stack([stream[start : start + length] for start in starts]).long()


def as_stream(stream: Tensor | np.ndarray) -> Tensor:
    """A stream as a tensor that shares its memory: token ids are often stored as uint16, and in a file, as
    `np.memmap("train.bin", np.uint16, "r")` reads it.

    Raises:
        ValueError: for anything but one dimension of integers.
    """
    with warnings.catch_warnings():  # PyTorch warns of arrays that cannot be written, which nothing here does
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        stream = torch.as_tensor(stream)
    if stream.ndim != 1 or stream.is_floating_point() or stream.dtype == torch.bool:
        raise ValueError(
            f"stream is {tuple(stream.shape)} {stream.dtype}, but must be one-dimensional and of integers, "
            "such as int64 or uint16; use token_stream"
        )
    return stream
