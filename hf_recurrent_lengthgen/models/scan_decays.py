"""What the chunked scans share: cutting into chunks, and decays between their tokens without cancellation.

The decay from one token to another is the exponential of a sum of gates. Differences of cumulated gates would lose the
weak gates after a strong one, so the sums are built over blocks that double in size, and the gradients of gates over
blocks that halve.

Shape suffixes as in scan_backends.py, and Z = chunks * B * H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# Chunks are taken together up to this number of entries of one input: few calls, but all within the CPU's cache.
_TOGETHER = 2**19


def chunk_groups(length: int, state_BHPN: Tensor, chunk_size: int) -> tuple[int, list[tuple[slice, slice]]]:
    """How to cut a sequence: the size of its chunks, and the chunks and tokens of groups that are computed together.

    The size is the next power of two of `chunk_size`, or of the length if that is less.
    """
    batch, heads, *widths = state_BHPN.shape
    size = 1
    while size < min(chunk_size, length):
        size *= 2
    step = max(1, _TOGETHER // (batch * heads * max(widths) * size))
    count = len(range(0, length, size))  # a range makes the length a constant where this is compiled
    groups = [slice(start, min(start + step, count)) for start in range(0, count, step)]
    return size, [(group, slice(group.start * size, group.stop * size)) for group in groups]


def to_chunks(t_BTHX: Tensor, size: int, repeats: int = 1) -> Tensor:
    """(B, T, H, X) -> contiguous (Z, Q, X), with zeros after the last token: no key, no decay; heads are repeated."""
    if rest := -t_BTHX.shape[1] % size:
        t_BTHX = F.pad(t_BTHX, (0, 0, 0, 0, 0, rest))
    chunks = t_BTHX.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
    return chunks.unsqueeze(3).expand(-1, -1, -1, repeats, -1, -1).contiguous().flatten(0, 3)


def from_chunks(t_ZQX: Tensor, out_BTHX: Tensor, repeats: int = 1) -> None:
    """(Z, Q, X) -> (B, T, H, X), written into `out_BTHX`; repeated heads are summed."""
    batch, _, heads, _ = out_BTHX.shape
    if repeats > 1:
        t_ZQX = t_ZQX.unflatten(0, (-1, repeats)).sum(1)
    chunks = t_ZQX.unflatten(0, (-1, batch, heads)).transpose(2, 3)
    for chunk, out in zip(chunks, out_BTHX.split(t_ZQX.shape[1], dim=1), strict=True):
        out.copy_(chunk[:, : out.shape[1]])


def halves(t_ZQN: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The left and right halves of all blocks of 2b tokens, views (Z * Q/2b, b, N)."""
    blocks = t_ZQN.view(-1, 2, b, t_ZQN.shape[-1])
    return blocks[:, 0], blocks[:, 1]


def below_diagonal(t_ZQQ: Tensor, b: int) -> Tensor:
    """Right half against left half of all blocks of 2b tokens, a view (Z, Q/2b, b, b)."""
    blocks = t_ZQQ.unflatten(2, (-1, 2, b)).unflatten(1, (-1, 2, b))
    return blocks.diagonal(dim1=1, dim2=4)[:, 1, :, 0].movedim(-1, 1)


class Decays:
    """All decays inside chunks: exponentials of sums over blocks that double in size.

    Attributes:
        levels: Of each b below Q in ascending order: from keys in left halves of blocks of 2b to the middle, and from
            the middle to queries in right halves, each (Z * Q/2b, b, N).
        from_start: From the chunk's start to each query, (Z, Q, N).
        to_end: From each key to the chunk's end, (Z, Q, N).
        total: Over the chunk, (Z, N).
    """

    def __init__(self, g_ZQN: Tensor, exclusive: bool) -> None:
        log2 = g_ZQN * math.log2(math.e)  # on a CPU, exp takes ten times longer where it underflows, exp2 does not
        to_end = torch.zeros_like(log2)
        from_start = torch.zeros_like(log2) if exclusive else log2.clone()
        totals, b = log2, 1  # totals of blocks of b
        self.levels: dict[int, tuple[Tensor, Tensor]] = {}
        while b < log2.shape[1]:
            to_middle, from_middle = halves(to_end, b)[0], halves(from_start, b)[1]
            self.levels[b] = to_middle.exp2(), from_middle.exp2()
            left, right = halves(totals, 1)
            to_middle += right
            from_middle += left
            totals, b = (left + right).view(len(log2), -1, log2.shape[2]), 2 * b
        self.from_start, self.to_end, self.total = from_start.exp2_(), to_end.exp2_(), totals[:, 0].exp2()


class GateGradient:
    """Sums over all products that a gate decays.

    `right` awaits sums over the tokens from a gate on, `left` sums over the tokens up to a gate, within blocks that
    halve in size.
    """

    def __init__(self, of_queries: Tensor, of_keys: Tensor, through: Tensor, exclusive: bool) -> None:
        self.exclusive = exclusive
        self.right, self.left = torch.zeros_like(of_queries), torch.zeros_like(of_keys)
        self._collect(self.right, self.left, of_queries, of_keys)
        self.right[:, -1] += through

    def _collect(self, right: Tensor, left: Tensor, of_queries: Tensor, of_keys: Tensor) -> None:
        """The decay of a query ends with its token, or before if exclusive; that of a key begins after its token."""
        if self.exclusive:
            right[:, :-1] += of_queries[:, 1:]
        else:
            right += of_queries
        left[:, 1:] += of_keys[:, :-1]

    def add(self, b: int, of_queries: Tensor, of_keys: Tensor) -> None:
        """Halve the blocks to size b, and add the products between both halves of each."""
        (right_0, right_1), (left_0, left_1) = halves(self.right, b), halves(self.left, b)
        right_0[:, -1] += right_1.sum(1)
        left_1[:, 0] += left_0.sum(1)
        self._collect(right_1, left_0, of_queries, of_keys)

    def result(self) -> Tensor:
        """(Z, Q, N), when the blocks have size 1."""
        return self.right + self.left
