"""Resets inside a row, for models that take one initial state per row."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .packing import IGNORED_LABEL

_FILL = {"input_ids": 0, "labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}


class Segments(NamedTuple):
    """Rows cut where their state resets.

    Row b of the B uncut rows is the rows first[b] to last[b] of `inputs`. Its carried state belongs into row
    first[b] if continues[b]; all other rows begin with zero. Its final state is that of row last[b].
    """

    inputs: dict[str, Any]  # tensors (N, longest segment)
    first: Tensor  # (B,) int64
    last: Tensor  # (B,) int64
    continues: Tensor  # (B,) bool, False where position 0 resets


def split_at_resets(inputs: dict[str, Any], state_resets: Tensor) -> Segments:
    """Make every segment between two resets a row of its own, so that each begins with its own state.

    The rows are padded on the right to the longest segment: with 0 in `input_ids` and -100 in the labels, and an
    `attention_mask` (N, longest segment) says so. Without a reset after position 0 the inputs come back as they
    are, without a mask. N grows with the number of resets, and padding costs as much as tokens: much shorter
    documents beside a long one are better packed in other ways.

    Args:
        inputs: `input_ids` (B, T), optionally `labels` and `shift_labels` (B, T), and values that are no tensors,
            which are passed on. Labels that the model shifts never reach across a cut; those that are
            shifted already are kept as they are.
        state_resets: (B, T) bool, True at tokens before which the state is zero.

    Raises:
        ValueError: state_resets of another dtype or shape; or, where rows must be cut, an `attention_mask` or
            another tensor than those above.
    """
    shape = inputs["input_ids"].shape
    if state_resets.dtype != torch.bool or state_resets.shape != shape:
        raise ValueError(
            f"state_resets is {tuple(state_resets.shape)} {state_resets.dtype}, but must be {tuple(shape)} torch.bool"
        )
    continues = ~state_resets[:, 0]
    if not bool(state_resets[:, 1:].any()):
        rows = torch.arange(len(state_resets), device=state_resets.device)
        return Segments(inputs, rows, rows, continues)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and (name not in _FILL or value.shape != shape):
            raise ValueError(
                f"inputs[{name!r}] {tuple(value.shape)} cannot be cut where states reset inside a row; only "
                f"{', '.join(_FILL)} of shape {tuple(shape)} can: give rows without padding or other tensors, or "
                "reset at the start of rows only"
            )

    begins = state_resets.clone()
    begins[:, 0] = True
    # (B T,): the segment of each token, and its place there
    segment = begins.flatten().cumsum(0) - 1
    place = torch.arange(len(segment), device=segment.device) - begins.flatten().nonzero()[:, 0][segment]
    size = (int(segment[-1]) + 1, int(place.max()) + 1)

    cut = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            cut[name] = value.new_full(size, _FILL[name])
            cut[name][segment, place] = value.flatten()
    cut["attention_mask"] = segment.new_zeros(size)
    cut["attention_mask"][segment, place] = 1
    of_rows = segment.view(shape)
    return Segments(cut, of_rows[:, 0], of_rows[:, -1], continues)
