"""Rows of a batch cut into chunks: for processes that split sequences (`sequence_group`), or one after another."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.models.modeling_heads import scored_labels
from hf_recurrent_lengthgen.models.rows import LAYOUT, Rows, read_rows, token_shape

from .packing import IGNORED_LABEL

CUT = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "shift_labels", "seq_idx")
"""What is cut; `labels` become `shift_labels`, `position_ids` `seq_idx`."""


def chunk_borders(length: int, size: int) -> list[int]:
    """Where the chunks of rows begin, and the end of the last one."""
    return [length * place // size for place in range(size + 1)]


def sequence_shard(inputs: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The inputs of one of the processes that split the sequences of a batch. Chunks differ by one token at most.

    Args:
        inputs: The whole rows, the same on all processes, as in `cut_rows`.
        rank: Of the process, from 0 in the order of time.
        size: Number of processes.

    Raises:
        ValueError: for rows of fewer tokens than processes, and as in `cut_rows`.
    """
    length = token_shape(inputs.get("input_ids"), inputs.get("inputs_embeds"))[1]
    if length < size:
        raise ValueError(
            f"Sequences of {length} tokens cannot be split over {size} processes: each needs a token. Give longer "
            "sequences, or fewer processes (context_parallel_size)."
        )
    return cut_rows(inputs, chunk_borders(length, size))[rank].inputs


class Chunk(NamedTuple):
    """A chunk of the rows of a batch.

    Attributes:
        inputs: Of the model, with `shift_labels` if there are targets and `seq_idx` if rows are packed.
        begins: (B,) bool, rows whose first real token in the chunk begins a sequence; None if there is none in any
            chunk. The chunk alone does not show it.
    """

    inputs: dict[str, Any]
    begins: Tensor | None


def cut_rows(inputs: Mapping[str, Any], borders: Sequence[int]) -> list[Chunk]:
    """The chunks of rows. The target of the last token of a chunk is the first token of the next.

    Args:
        inputs: The whole rows: `input_ids` or `inputs_embeds` (B, S, ...), and any of `labels`, `shift_labels`,
            `attention_mask`, `token_type_ids`, `seq_idx` and `position_ids`, (B, S) each. Values without tokens, such
            as `initial_state`, go into each chunk.
        borders: Where chunks begin, from 0, and S, the end of the last one.

    Raises:
        ValueError: for other inputs with tokens, and for targets at padding where a chunk begins, whose output is in
            the chunk before.
    """
    shape = token_shape(inputs.get("input_ids"), inputs.get("inputs_embeds"))
    whole = {name: value for name, value in inputs.items() if value is not None}
    rows = read_rows(whole)
    whole = {name: value for name, value in whole.items() if name not in LAYOUT}
    if rows.real is not None:
        whole["attention_mask"] = rows.real.long()
    if rows.starts is not None:
        whole["seq_idx"] = rows.starts.cumsum(1)
    labels = whole.pop("labels", None)
    if (targets := shifted_targets(labels, whole.get("shift_labels"), rows)) is not None:
        whole["shift_labels"] = targets
        _check_targets(targets, rows.real, borders)
    others = {name: value for name, value in whole.items() if name not in CUT}
    if wrong := sorted(name for name, x in others.items() if isinstance(x, Tensor) and x.shape[:2] == shape):
        raise ValueError(
            f"{wrong} cannot be cut into chunks: leave them out. What is cut is {', '.join(CUT)}, labels and "
            "position_ids."
        )
    chunks = []
    for columns in (slice(*pair) for pair in pairwise(borders)):
        cut = {name: value[:, columns].contiguous() if name in CUT else value for name, value in whole.items()}
        chunks.append(Chunk(cut, _begins_anew(rows, columns)))
    return chunks


def shifted_targets(labels: Tensor | None, shift_labels: Tensor | None, rows: Rows) -> Tensor | None:
    """The target of output t at position t, (B, S), as scored on the whole sequence; None if there are none.

    Raises:
        ValueError: for labels that are not one target for each token.
    """
    if shift_labels is not None:
        return scored_labels(shift_labels, rows, shifted=True)
    if labels is None:
        return None
    if labels.shape != rows.shape:
        raise ValueError(
            f"labels must have one target for each token, {rows.shape}, to be cut into chunks, got "
            f"{tuple(labels.shape)}."
        )
    targets = pad(scored_labels(labels, rows)[:, 1:], (0, 1), value=IGNORED_LABEL)
    return scored_labels(targets, rows, shifted=True)


def _begins_anew(rows: Rows, columns: slice) -> Tensor | None:
    if rows.starts is None:
        return None
    if rows.real is None:
        return rows.starts[:, columns.start]
    return (rows.starts[:, columns] & (rows.real[:, columns].cumsum(1) == 1)).any(1)


def _check_targets(targets: Tensor, real: Tensor | None, borders: Sequence[int]) -> None:
    """A `ValueError` if a target stands at padding in the beginning of a chunk, after real tokens."""
    if real is None:
        return
    read = real.cumsum(1)
    begins = [begin for begin, end in pairwise(borders) for _ in range(begin, end)]  # of the chunk of each token
    before = pad(read, (1, 0))[:, torch.tensor(begins, device=real.device)]
    lost = (read == before) & (before > 0) & (targets != IGNORED_LABEL)
    if bool(lost.any()):
        row, place = lost.nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has padding inside, at position {place}, at the beginning of a chunk, and the token after it "
            "is a target, whose output is in the chunk before: pad rows at their ends, or give that token the label "
            "-100."
        )
