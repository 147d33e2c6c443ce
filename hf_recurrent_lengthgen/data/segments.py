"""Resets inside a row, for models that take one initial state per row."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.rows import LAYOUT, Rows

from .packing import IGNORED_LABEL

_FILL = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}


class Segments(NamedTuple):
    """Rows cut where their state resets.

    Row b of the B uncut rows becomes the rows first[b] to last[b] of `inputs`. Row first[b] starts from its carried
    state if continues[b]; all other rows start from zero. Its final state is that of row last[b].
    """

    inputs: dict[str, Any]  # tensors (N, longest segment)
    first: Tensor  # (B,) int64
    last: Tensor  # (B,) int64
    continues: Tensor  # (B,) bool, False where position 0 resets


def split_at_resets(inputs: dict[str, Any], state_resets: Tensor) -> Segments:
    """Make every segment between two resets a separate row, so that each starts from its own state.

    Rows are padded on the right to the longest segment, with 0 in `input_ids` and -100 in the labels, and get an
    `attention_mask` (N, longest segment). Without a reset after position 0 the inputs are returned unchanged, without
    a mask. N grows with the number of resets, and padding costs as much as tokens: if most documents are much shorter
    than the longest, other ways of packing are better.

    Args:
        inputs: `input_ids` (B, T), optionally `labels`, `shift_labels` and an `attention_mask` of 0 and 1 (B, T), and
            values other than tensors, which are passed on. Labels that the model shifts never cross a cut; labels that
            are shifted already are kept.
        state_resets: (B, T) bool, True at tokens before which the state is zero.

    Raises:
        ValueError: for state_resets of another dtype or shape; and if rows must be cut, for tensors other than those
            above.
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
                f"{', '.join(_FILL)} of shape {tuple(shape)} can: give rows without other tensors, or reset "
                "at the start of rows only"
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
    if "attention_mask" not in inputs:
        cut["attention_mask"] = segment.new_zeros(size)
        cut["attention_mask"][segment, place] = 1
    of_rows = segment.view(shape)
    return Segments(cut, of_rows[:, 0], of_rows[:, -1], continues)


def unpacked(inputs: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """One padded row per sequence of packed rows.

    Args:
        inputs: As in `split_at_resets`, and what describes the rows.
        rows: What it says (`read_rows`); sequences begin inside them.

    Raises:
        ValueError: for other tensors.
    """
    assert rows.starts is not None
    whole = {name: value for name, value in inputs.items() if name not in LAYOUT}
    if rows.real is not None:
        whole["attention_mask"] = rows.real.long()
    return split_at_resets(whole, rows.starts).inputs
