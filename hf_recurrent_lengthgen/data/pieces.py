"""Rows cut into pieces for the processes that share them (`sequence_group` of the models)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.models.modeling_heads import scored_labels
from hf_recurrent_lengthgen.models.rows import LAYOUT, read_rows

from .packing import IGNORED_LABEL

CUT = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "shift_labels", "seq_idx")
"""What is cut; `labels` become `shift_labels`, `position_ids` `seq_idx`."""


def piece_borders(length: int, size: int) -> list[int]:
    """Where the pieces of rows begin, and the end of the last one."""
    return [length * place // size for place in range(size + 1)]


def piece_of_rows(inputs: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """What one of the processes that share the rows of a batch gives to the model.

    Pieces differ by one token at most. The target of the last token of a piece is the first token of the next.

    Args:
        inputs: The whole rows, the same on all processes: `input_ids` or `inputs_embeds` (B, S, ...), and any of
            `labels`, `shift_labels`, `attention_mask`, `token_type_ids`, `seq_idx` and `position_ids`, (B, S) each.
            Values without tokens, such as `initial_state`, are passed on.
        rank: Of the process, from 0 in the order of time.
        size: Number of processes.

    Returns:
        The inputs of the piece, with `shift_labels` if there are targets and `seq_idx` if rows are packed.

    Raises:
        ValueError: for rows of fewer tokens than processes, for other inputs with tokens, and for targets at padding
            where a piece begins, whose output is in the piece before.
    """
    tokens = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
    shape, length = tuple(tokens.shape[:2]), tokens.shape[1]
    if length < size:
        raise ValueError(
            f"Rows of {length} tokens cannot be shared by {size} processes: each needs a token. Give longer rows, or "
            "fewer processes (context_parallel_size)."
        )
    whole = {name: value for name, value in inputs.items() if value is not None}
    rows = read_rows(whole)
    whole = {name: value for name, value in whole.items() if name not in LAYOUT}
    if rows.real is not None:
        whole["attention_mask"] = rows.real.long()
    if rows.starts is not None:
        whole["seq_idx"] = rows.starts.cumsum(1)
    targets = whole.get("shift_labels")
    if (labels := whole.pop("labels", None)) is not None and targets is None:
        if labels.shape != shape:
            raise ValueError(
                f"labels must have one target for each token, {shape}, to be cut into pieces, got "
                f"{tuple(labels.shape)}."
            )
        targets = pad(scored_labels(labels, rows)[:, 1:], (0, 1), value=IGNORED_LABEL)
    borders = piece_borders(length, size)
    piece = slice(borders[rank], borders[rank + 1])
    if targets is not None:
        whole["shift_labels"] = scored_labels(targets, rows, shifted=True)
        _check_targets(whole["shift_labels"], rows.real, borders)
    wrong = sorted(
        name
        for name, value in whole.items()
        if name not in CUT and isinstance(value, Tensor) and value.shape[:2] == shape
    )
    if wrong:
        raise ValueError(
            f"{wrong} cannot be cut into pieces of rows: leave them out. What is cut is {', '.join(CUT)}, labels and "
            "position_ids."
        )
    return {name: value[:, piece] if name in CUT else value for name, value in whole.items()}


def _check_targets(targets: Tensor, real: Tensor | None, borders: list[int]) -> None:
    """A `ValueError` if a target stands at padding in the beginning of a piece, after real tokens."""
    if real is None:
        return
    read = real.cumsum(1)
    starts, places = (torch.tensor(numbers, device=real.device) for numbers in (borders[:-1], range(borders[-1])))
    begins = starts[torch.searchsorted(starts, places, right=True) - 1]  # of the piece of each token
    before = pad(read, (1, 0))[:, begins]
    lost = (read == before) & (before > 0) & (targets != IGNORED_LABEL)
    if bool(lost.any()):
        row, place = lost.nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has padding inside, at position {place}, at the beginning of a piece, and the token after it "
            "is a target, whose output is in the piece before: pad rows at their ends, or give that token the label "
            "-100."
        )
