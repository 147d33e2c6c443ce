"""The inputs of a model beside its state (tokens, masks, positions), and their checks.

Shapes: B batch, T tokens, D hidden size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from .packed_rows import piece_starts, sequence_starts
from .recurrent_cache import RecurrentCache


class TokenInputs(NamedTuple):
    """The tokens of one call of a model.

    Attributes:
        shape: (B, T).
        real: (B, T) bool, true at real tokens; None if all are.
        starts: (B, T) bool, where sequences begin inside rows; None if none does.
    """

    shape: tuple[int, int]
    real: Tensor | None
    starts: Tensor | None


def read_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    cache: RecurrentCache | None,
    position_ids: Tensor | None,
    others: dict[str, Any],
    group: ProcessGroup | None = None,
) -> TokenInputs:
    """Check what a model is given; arguments as in `StatefulBackbone.forward`."""
    given = sorted(name for name, x in others.items() if x is not None and x is not False and name != "seq_idx")
    if given:
        raise ValueError(
            f"A recurrent model does not take the arguments {given}: remove them."
            + " It has no attentions to return." * ("output_attentions" in given)
        )
    shape = token_shape(input_ids, inputs_embeds)
    real = real_tokens(mask_of_new_tokens(attention_mask, cache, shape))
    if group is not None:
        starts = _starts_in_piece(others.get("seq_idx"), position_ids, cache, shape, real, group)
        return TokenInputs(shape, real, starts)
    packing = {"position_ids": position_ids, "seq_idx": others.get("seq_idx")}
    return TokenInputs(shape, real, starts_inside_rows(packing, shape, real))


def _starts_in_piece(
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
    cache: RecurrentCache | None,
    shape: tuple[int, int],
    real: Tensor | None,
    group: ProcessGroup,
) -> Tensor | None:
    if position_ids is not None or cache is not None:
        name = "position_ids" if cache is None else "cache"
        raise ValueError(
            f"With a sequence_group, leave {name} out: packed rows take seq_idx, counted over the pieces, and states "
            "go in as initial_state and out as final_state."
        )
    if seq_idx is None:
        return None
    sequence_starts({"seq_idx": seq_idx}, shape, real)  # checks shape and kind
    return piece_starts(seq_idx.expand(shape), real, group)


def given_cache(cache: RecurrentCache | None, others: dict[str, Any]) -> RecurrentCache | None:
    """The cache of a call, which may also be among the other arguments, under the older name `past_key_values`.

    Raises:
        ValueError: if it has both names, or is the cache of another model.
    """
    older = others.pop("past_key_values", None)
    if cache is not None and older is not None:
        raise ValueError("cache and past_key_values are two names of one argument: give cache.")
    check_cache(older if cache is None else cache)
    return older if cache is None else cache


def check_cache(cache: Any) -> None:
    """Raise a `ValueError` for a cache of another model."""
    if cache is not None and not isinstance(cache, RecurrentCache):
        raise ValueError(f"cache must be a RecurrentCache, got {type(cache).__name__}; give a state as initial_state.")


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


def token_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """(B, T). Raises a `ValueError` if not exactly one of both is given, or it has no tokens."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    batch_size, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
    if 0 in (batch_size, length):
        raise ValueError(f"The input has no tokens ({batch_size} rows of {length}): give at least one of each.")
    return batch_size, length


def mask_of_new_tokens(
    attention_mask: Tensor | None, cache: RecurrentCache | None, shape: tuple[int, int]
) -> Tensor | None:
    """The last T columns of a mask, (B, T), or (B, tokens_seen + T) with the tokens that the cache has read."""
    if attention_mask is None or attention_mask.shape == shape:
        return attention_mask
    seen = 0 if cache is None else cache.tokens_seen
    if attention_mask.shape == (shape[0], seen + shape[1]):
        return attention_mask[:, seen:]
    past = f", or with the tokens that the cache has read {(shape[0], seen + shape[1])}" if seen else ""
    raise ValueError(
        f"attention_mask must have the shape of the tokens, {shape}{past}, got {tuple(attention_mask.shape)}."
    )


def real_tokens(attention_mask: Tensor | None) -> Tensor | None:
    """(B, T), true at real tokens; None if all are. Raises a `ValueError` for a mask of other values than 0 and 1."""
    if attention_mask is None:
        return None
    real = attention_mask.bool()
    if not torch.compiler.is_compiling():
        if attention_mask.dtype != torch.bool and not bool((attention_mask == real).all()):
            raise ValueError("attention_mask must hold 1 at real tokens and 0 at padding only.")
        if bool(real.all()):
            return None
    return real


def starts_inside_rows(packing: Mapping[str, Any], shape: tuple[int, int], real: Tensor | None) -> Tensor | None:
    """See `sequence_starts`, which breaks compiled graphs and is called only with something to read."""
    given = {name: x for name, x in packing.items() if x is not None}
    return sequence_starts(given, shape, real) if given else None


def scored_labels(
    labels: Tensor, attention_mask: Tensor | None, starts: Tensor | None, shifted: bool = False
) -> Tensor:
    """Labels (B, T) with -100 where a language model has nothing to predict them from.

    That is the first real token of a row behind padding, and the first token of a sequence inside a packed row. The
    label of the first column, which a shift leaves out, stays as it is. If `shifted`, the target of output t is at t,
    as in `shift_labels`: borders are up to the caller, and only outputs before the first real token are not scored.
    """
    if attention_mask is not None:
        unread = attention_mask.long().cumsum(1) == 0
        labels = labels.masked_fill(unread if shifted else pad(unread[:, :-1], (1, 0)), -100)
    if starts is not None and not shifted:
        labels = labels.masked_fill(starts, -100)
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
