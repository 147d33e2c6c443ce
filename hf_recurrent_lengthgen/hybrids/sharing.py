"""Rows of a wrapped model that several processes share, each with a piece of them (`models/rows_shared.py`).

Recurrent layers run their scan from the state folded from the maps of all pieces. Attention layers attend to their own
keys and values and to those gathered from the pieces before, of which a window needs the last.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_shared import gathered


class Shared:
    """What the cache of a call knows of the other pieces.

    Attributes:
        rows: Of this piece, for scans and convolutions.
        lengths: Tokens of all pieces.
        sent: The last tokens of each piece, whose keys the next pieces may need.
        before: Tokens before this piece whose keys it attends to.
    """

    def __init__(self, group: Any, shape: tuple[int, int], device: torch.device, window: int | None = None) -> None:
        self.rows = Rows(shape, group=group)
        self.rank = dist.get_rank(group)
        lengths = gathered(torch.tensor([shape[1]], device=device), group)
        self.lengths = [int(one) for one in lengths]
        self.sent = [length if window is None else min(length, window - 1) for length in self.lengths]
        self.before = min(self.start, self.start if window is None else window - 1)

    @property
    def start(self) -> int:
        """Position of the first token."""
        return sum(self.lengths[: self.rank])

    def up_to_here(self, x: Tensor) -> Tensor:
        """Keys or values (B, H, T, D) of this piece, after those of the `before` tokens before it."""
        sent, group = self.sent[self.rank], self.rows.group
        assert group is not None
        if not any(self.sent):
            return x
        first, last = x.split([x.shape[2] - sent, sent], dim=2)
        whole = gathered(torch.nn.functional.pad(last, (0, 0, 0, max(self.sent) - sent)), group)
        pieces = [part[:, :, :length] for part, length in zip(whole, self.sent, strict=True)]
        earlier = torch.cat([x[:, :, :0], *pieces[: self.rank]], dim=2)[
            :, :, sum(self.sent[: self.rank]) - self.before :
        ]
        return torch.cat([earlier, first, pieces[self.rank]], dim=2)  # its own, too: all go back through the gather
