"""What a checkpoint was converted from, and what its upstream implementation gives."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """Tokens (B, T) to read, the dtype to compute in, and where."""

    tokens: Tensor
    dtype: torch.dtype
    device: str


def open_source(source: str, folder: Path) -> Any:
    """Open a source to compare with."""
    raise ValueError(f"{source} cannot be compared with yet: verify the checkpoint alone.")
