"""Data for truncated backpropagation through time: row i of a step continues row i of the previous step.

A stream row is one row of the global batch over time, including the micro-batches of gradient accumulation.
`ContinuedChunks` cuts one token stream into chunks, and `StreamRowSampler` orders them by stream row. An item with
T = length and l = lookahead is

    input_ids     (T + l,) int64
    labels        (T + l,) int64, the input_ids
    shift_labels  (T + l,) int64, the token after each input token, -100 where it must not be predicted
    state_resets  (T + l,) bool, True at tokens before which the state is zero

Chunks of a stream row are T tokens apart, so the target of a chunk's last token is the first token of the next chunk.
The l extra tokens overlap the next chunk. As in Chen et al., 2024 (arXiv:2410.07145, "Truncated Backpropagation
Through Time"), the state is by default carried over 12 chunks, also across documents.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .packing import IGNORED_LABEL, as_stream

Item = dict[str, Tensor]


class ChunkKey(NamedTuple):
    """The key by which `StreamRowSampler` requests a chunk.

    The key has the flag, not the dataset, because data workers hold copies of the dataset.
    """

    chunk: int
    begins: bool  # whether the state is zero before the chunk


class ContinuedChunks(Dataset[Item]):
    """Chunks of T tokens of one stream, each continuing the previous one; items as in the module's docstring.

    Item i is the chunk at token i T. It begins with a zero state if i is a multiple of `chunks_before_reset`. Item
    ChunkKey(i, begins) is the same chunk, with a zero state if `begins`. Tensors may be views of the stream.

    Args:
        stream: (n,) integers with `separator_id` after each document, as `token_stream` makes it; of any size, and
            one that does not fit into memory may lie in a file (`np.memmap("tokens.bin", np.uint16, "r")`).
        length: T, at least 1.
        chunks_before_reset: Number of chunks over which the state is carried. None to reset only at the first chunk
            of each stream row.
        reset_at_document: Also reset at the first token of each document, anywhere in a chunk. The previous token does
            not predict it (target -100).
        separator_id: The token that ends documents; only `reset_at_document` needs it.
        lookahead: l, extra tokens at the end of each item, which also begin the next chunk.

    Raises:
        ValueError: for a stream that is not one-dimensional and of integers, or is too short for one chunk, and for
            `reset_at_document` without a separator that occurs in the stream.
    """

    def __init__(
        self,
        stream: Tensor | np.ndarray,
        length: int,
        chunks_before_reset: int | None = 12,
        reset_at_document: bool = False,
        separator_id: int | None = None,
        lookahead: int = 0,
    ) -> None:
        stream = as_stream(stream)
        if reset_at_document and (separator_id is None or not bool((stream.numpy() == separator_id).any())):
            raise ValueError(
                f"separator_id is {separator_id}, which does not occur in the stream, so reset_at_document would "
                "never reset; give the token that ends its documents, or set reset_at_document=False"
            )
        self._chunks = (len(stream) - lookahead - 1) // length
        if self._chunks < 1:
            raise ValueError(
                f"the stream has {len(stream)} tokens, but one chunk of length {length} with lookahead {lookahead} "
                f"and its last target needs {length + lookahead + 1}; give more data or a smaller length"
            )
        self.stream = stream
        self.length = length
        self.chunks_before_reset = chunks_before_reset
        self.reset_at_document = reset_at_document
        self.separator_id = separator_id
        self.lookahead = lookahead

    def __len__(self) -> int:
        return self._chunks

    @property
    def chunks_of_sequence(self) -> int:
        """`chunks_before_reset`, or all chunks where it is None."""
        return self.chunks_before_reset or len(self)

    def __getitem__(self, key: int | ChunkKey) -> Item:
        index = range(len(self))[key.chunk if isinstance(key, ChunkKey) else key]
        begins = key.begins if isinstance(key, ChunkKey) else index % self.chunks_of_sequence == 0
        start = index * self.length
        tokens = self.stream[start : start + self.length + self.lookahead + 1].long()
        targets, resets = tokens[1:], torch.zeros(len(tokens) - 1, dtype=torch.bool)
        if self.reset_at_document:
            assert self.separator_id is not None
            first = start == 0 or int(self.stream[start - 1]) == self.separator_id
            document_starts = torch.cat([torch.tensor([first]), tokens[:-1].eq(self.separator_id)])
            targets = targets.masked_fill(document_starts[1:], IGNORED_LABEL)
            resets |= document_starts[:-1]
        if begins:
            resets[0] = True
        return {"input_ids": tokens[:-1], "labels": tokens[:-1], "shift_labels": targets, "state_resets": resets}


class StreamRowSampler(Sampler[ChunkKey]):
    """Keys of `ContinuedChunks`, time-major: each step has `stream_rows` keys, and stream row j of a step continues
    stream row j of the previous step, until its sequence ends and another one begins.

    The sequences are put in random order by (seed, epoch), concatenated and cut into `stream_rows` equally long
    stretches, which are assigned to stream rows at random. A stream row begins with a zero state, so a sequence across
    two stretches becomes two sequences. With chunks_before_reset=None each stream row is one contiguous stretch of the
    stream. An epoch has every chunk at most once.

    With batches of B rows, `stream_rows` = B x processes x micro-batches of gradient accumulation. Consecutive
    batches are those of process 0, 1, ... in micro-batch 0, then those of micro-batch 1, which is how accelerate
    distributes batches.

    Args:
        dataset: The chunks.
        stream_rows: Number of stream rows, at least 1.
        seed: Seed, the same on every process.

    Attributes:
        steps: Steps per epoch, number of chunks // stream rows. The chunks left over, the last of the random order,
            differ from epoch to epoch unless `chunks_before_reset` is None.

    Raises:
        ValueError: for fewer chunks than stream rows, with sizes that would fit.
    """

    def __init__(self, dataset: ContinuedChunks, stream_rows: int, seed: int) -> None:
        if len(dataset) < stream_rows:
            raise ValueError(
                f"the stream has {len(dataset)} chunks of {dataset.length} tokens, but {stream_rows} stream rows "
                "(batch size x processes x micro-batches) need one each: "
                f"{len(dataset)} stream rows, a smaller length or more data would fit"
            )
        self.dataset = dataset
        self.stream_rows = stream_rows
        self.seed = seed
        self.epoch = 0
        self.steps = len(dataset) // stream_rows

    def __len__(self) -> int:
        return self.steps * self.stream_rows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[ChunkKey]:
        size, chunks = self.dataset.chunks_of_sequence, len(self.dataset)
        digest = hashlib.blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=8).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        sequences = torch.randperm(-(-chunks // size), generator=random)
        order = (sequences[:, None] * size + torch.arange(size)).flatten()
        order = order[order < chunks][: len(self)]  # the stream's last sequence may be shorter
        stretches = order.view(self.stream_rows, self.steps)[torch.randperm(self.stream_rows, generator=random)]
        for step, indices in enumerate(stretches.unbind(1)):
            for index in indices.tolist():
                yield ChunkKey(index, step == 0 or index % size == 0)


def keep_long_documents(stream: Tensor | np.ndarray, separator_id: int, minimum_tokens: int) -> Tensor:
    """The stream without short documents and their separators (below 4K tokens in Chen et al., 2024).

    Args:
        stream: (n,) integers with `separator_id` after each document; the last one may lack it.
        separator_id: The token that ends documents.
        minimum_tokens: Minimum number of tokens in a document, without the separator.

    Raises:
        ValueError: for a stream that is not one-dimensional and of integers, and if no document is long enough.
    """
    stream = as_stream(stream)
    spans = np.diff(np.flatnonzero(stream.numpy() == separator_id) + 1, prepend=0, append=len(stream))
    lengths = spans - 1
    lengths[-1] += 1  # no separator follows the last one
    long = stream[torch.from_numpy(np.repeat(lengths >= minimum_tokens, spans))]
    if not len(long):
        raise ValueError(
            f"no document of the stream has {minimum_tokens} tokens, the longest has {int(lengths.max())}; "
            "give longer documents or a smaller minimum"
        )
    return long
