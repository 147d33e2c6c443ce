"""The inputs of a model beside its state (tokens, masks, positions), and their checks.

Shapes: B batch, T tokens, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from .configuration_code import OLD_CACHE_NAMES
from .recurrent_cache import RecurrentCache
from .rows import LAYOUT, Rows, mask_of_new_tokens, read_rows, real_tokens, token_shape
from .sequence_pieces import read_piece
from .virtual_tokens import NO_KEYS


def read_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    cache: RecurrentCache | None,
    position_ids: Tensor | None,
    others: dict[str, Any],
    group: ProcessGroup | None = None,
) -> Rows:
    """Check what a model is given, and read its rows; arguments as in `StatefulBackbone.forward`."""
    given = sorted(name for name, x in others.items() if x is not None and x is not False and name not in LAYOUT)
    if given:
        raise ValueError(
            f"A recurrent model does not take the arguments {given}: remove them."
            + " It has no attentions to return." * ("output_attentions" in given)
        )
    rows = {name: x for name, x in others.items() if name in LAYOUT and x is not None}
    rows |= {"attention_mask": attention_mask, "position_ids": position_ids}
    if group is None:
        tokens = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        return read_rows(rows | tokens, 0 if cache is None else cache.tokens_seen)
    wrong = [name for name in rows if name not in ("attention_mask", "seq_idx") and rows[name] is not None]
    if wrong or cache is not None:
        raise ValueError(
            f"With a sequence_group, leave {', '.join(wrong) or 'cache'} out: packed rows take seq_idx, "
            "counted over the pieces, and states go in as initial_state and out as final_state."
        )
    shape = token_shape(input_ids, inputs_embeds)
    return read_piece(rows.get("seq_idx"), shape, real_tokens(mask_of_new_tokens(attention_mask, 0, shape)), group)


def given_cache(cache: RecurrentCache | None, others: dict[str, Any]) -> RecurrentCache | None:
    """The cache of a call, which may also be among the other arguments, under an older name.

    Raises:
        ValueError: if it has two names, or is the cache of another model.
    """
    for name in OLD_CACHE_NAMES:
        older = others.pop(name, None)
        if cache is not None and older is not None:
            raise ValueError(f"cache and {name} are two names of one argument: give cache.")
        cache = older if cache is None else cache
    check_cache(cache)
    return cache


def check_cache(cache: Any) -> None:
    """Raise a `ValueError` for a cache of another model."""
    if cache is not None and not isinstance(cache, RecurrentCache):
        raise ValueError(
            f"cache must be a RecurrentCache, got {type(cache).__name__}; give a state as initial_state. If PEFT gave "
            f"it: {NO_KEYS}."
        )


def check_token_types(token_type_ids: Tensor | None, real: Tensor | None) -> None:
    """Raise a `ValueError` for a real token whose type is not 0."""
    if token_type_ids is None or torch.compiler.is_compiling():
        return
    if bool((token_type_ids if real is None else token_type_ids.masked_fill(~real, 0)).any()):
        raise ValueError("token_type_ids must be 0 at all tokens: a recurrent language model has no token types.")


def check_token_ids(ids: Tensor, vocabulary: int, name: str = "input_ids", ignored: int | None = None) -> None:
    """Check ids (B, T) before an embedding or a loss indexes with them and fails without a position, or not at all."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {ids.dtype} of shape {tuple(ids.shape)}.")
    if not ids.numel():
        return
    lowest, highest = ids.aminmax()
    if lowest >= 0 and highest < vocabulary:
        return
    wrong = (ids < 0) | (ids >= vocabulary)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        told = f"row {place[0]}, position {place[-1]}"
        also = "" if ignored is None else f", or {ignored} for none"
        raise ValueError(
            f"{name} must be from 0 to {vocabulary - 1}{also}, got {int(ids[place])} in {told}: tokenize with the "
            "model's own tokenizer."
        )


def scored_labels(labels: Tensor, rows: Rows, shifted: bool = False) -> Tensor:
    """Labels (B, T) with -100 where a language model has nothing to predict them from.

    That is the first real token of a row behind padding, and the first token of a sequence inside a packed row. The
    label of the first column, which a shift leaves out, stays as it is. If `shifted`, the target of output t is at t,
    as in `shift_labels`: borders are up to the caller, and only outputs before the first real token are not scored.
    """
    if rows.real is not None:
        unread = rows.real.long().cumsum(1) == 0
        labels = labels.masked_fill(unread if shifted else pad(unread[:, :-1], (1, 0)), -100)
    if rows.starts is not None and not shifted:
        labels = labels.masked_fill(rows.starts, -100)
    return labels


def check_targets(
    labels: Tensor | None, shift_labels: Tensor | None, real: Tensor | None, group: ProcessGroup
) -> None:
    """Refuse targets that a piece of rows cannot score."""
    if labels is not None:
        raise ValueError(
            "With a sequence_group, give shift_labels in place of labels: the target of the last token is in the next "
            "piece."
        )
    if shift_labels is None or real is None or torch.distributed.get_rank(group) == 0:
        return
    unread = real.long().cumsum(1) == 0
    if bool((unread & (shift_labels != -100)).any()):
        raise ValueError(
            "A target stands at padding in the beginning of a piece, but its output is that of the last real token, "
            "in another piece: set it to -100, or pad rows at their ends."
        )
