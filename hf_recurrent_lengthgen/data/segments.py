"""Sequences of packed rows as rows of their own, for models that take one initial state per row."""

from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.rows import LAYOUT, Rows

from .collating import FILL


def unpacked(inputs: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """One row per sequence, padded on the right to the longest with 0 in `input_ids` and -100 in the labels.

    Padding costs as much as tokens: if most sequences are much shorter than the longest, other ways of packing are
    better.

    Args:
        inputs: `input_ids` (B, T), optionally `labels` and `shift_labels` (B, T), what describes the rows, and values
            other than tensors, which are passed on. Labels that the model shifts never cross a cut; labels that are
            shifted already stay.
        rows: What the inputs say (`read_rows`); sequences begin inside them.

    Returns:
        The inputs with an `attention_mask`, (N, longest sequence) each.

    Raises:
        ValueError: for other tensors.
    """
    assert rows.starts is not None
    begins = rows.starts.clone()
    begins[:, 0] = True
    whole = {name: value for name, value in inputs.items() if name not in LAYOUT}
    whole["attention_mask"] = (torch.ones_like(begins) if rows.real is None else rows.real).long()
    for name, value in whole.items():
        if isinstance(value, Tensor) and (name not in FILL or value.shape != rows.shape):
            raise ValueError(
                f"inputs[{name!r}] {tuple(value.shape)} cannot be cut where sequences begin inside a row; only "
                f"{', '.join(FILL)} of shape {rows.shape} can: give rows of one sequence, or no other tensors."
            )
    # (B T,): the sequence of each token, and its place there
    sequence = begins.flatten().cumsum(0) - 1
    place = torch.arange(len(sequence), device=sequence.device) - begins.flatten().nonzero()[:, 0][sequence]
    size = (int(sequence[-1]) + 1, int(place.max()) + 1)
    cut = dict(whole)
    for name, value in whole.items():
        if isinstance(value, Tensor):
            cut[name] = value.new_full(size, FILL[name])
            cut[name][sequence, place] = value.flatten()
    return cut
