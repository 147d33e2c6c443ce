"""The rows of one call as one value, read once from every form in which users and collators describe them.

A mask (B, T) of 1 and 0 tells padding. Where sequences begin inside rows, any of these tell, and must agree:

- `position_ids` (B or 1, T), which restart;
- `seq_idx` (B or 1, T), the number of each token's sequence;
- borders of sequences among all B * T tokens, (N + 1,), as kernels of attention take them. The largest lengths
  (`LONGEST`) that go with them say nothing alone.

Shapes: B rows, T tokens, N sequences.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from .configuration_stateful import optional_module

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
LONGEST = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
LAYOUT = ("attention_mask", "position_ids", "seq_idx", *BORDERS, *LONGEST)
"""The arguments of a model that describe its rows."""


class Rows(NamedTuple):
    """The rows of one call, from the arguments of a model down to its convolutions and scans.

    Layers get them moved (rows_moved.py): each is one sequence, with padding at its end only. To them, None stands for
    rows of real tokens that nobody shares.

    Attributes:
        shape: (B, T).
        real: (B, T) bool, true at real tokens; None if all are.
        starts: (B, T) bool, where sequences begin inside rows; None if none does. The first real token of a row
            begins no sequence: it continues from the row's initial state.
        group: The processes that share the rows, each with a chunk of them, in the order of time (rows_shared.py);
            None for whole rows.
        ended: For layers, in packed rows with a `group`: (B,) bool, where the sequence that enters the chunk ends in
            it. The layer then gets 2 B rows, the sequences that enter the chunk, and the last ones of each row, which
            begin in it.
    """

    shape: tuple[int, int]
    real: Tensor | None = None
    starts: Tensor | None = None
    group: ProcessGroup | None = None
    ended: Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: Tensor, length: int) -> "Rows":
        """Rows of `length` tokens, the first `lengths` (B,) of them real."""
        return cls((len(lengths), length), torch.arange(length, device=lengths.device) < lengths[:, None])

    @property
    def lengths(self) -> Tensor | None:
        """Real tokens of each row, (B,); None if all are."""
        return None if self.real is None else self.real.sum(1)


def read_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    cache: Any,
    position_ids: Tensor | None,
    others: dict[str, Any],
    group: ProcessGroup | None = None,
) -> Rows:
    """Check the inputs of a model, and read its rows; arguments as in `StatefulBackbone.forward`."""
    unknown = sorted(name for name, x in others.items() if x is not None and x is not False and name not in LAYOUT)
    if unknown:
        raise ValueError(
            f"A recurrent model does not take the arguments {unknown}: remove them."
            + " It has no attentions to return." * ("output_attentions" in unknown)
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
            "counted over the chunks, and states go in as initial_state and out as final_state."
        )
    shape = token_shape(input_ids, inputs_embeds)
    real = real_tokens(mask_of_new_tokens(attention_mask, 0, shape))
    return optional_module("rows_shared").read_chunk(rows.get("seq_idx"), shape, real, group)


def read_rows(inputs: Mapping[str, Any], seen: int = 0) -> Rows:
    """The rows of a call. Where sequences may begin inside them, reading breaks compiled graphs.

    Positions that count up tell nothing, wherever they start; where they restart, at 0 or at the first position of the
    row, a sequence begins. Padding is skipped.

    Args:
        inputs: The arguments of the call: `input_ids` or `inputs_embeds`, and any of `LAYOUT`.
        seen: Tokens before those of the call, for which a mask (B, seen + T) may have columns, too.

    Raises:
        ValueError: for forms of another shape or kind, that no recurrent model can follow, or that contradict each
            other.
    """
    shape = token_shape(inputs.get("input_ids"), inputs.get("inputs_embeds"))
    real = real_tokens(mask_of_new_tokens(inputs.get("attention_mask"), seen, shape))
    forms = {name: inputs[name] for name in ("position_ids", "seq_idx", *BORDERS) if inputs.get(name) is not None}
    if forms:
        return Rows(shape, real, _starts(forms, shape, real))
    if real is None and not torch.compiler.is_compiling():
        shorter = [name for name in LONGEST if inputs.get(name) is not None and int(inputs[name]) < shape[1]]
        if shorter:
            raise ValueError(
                f"{shorter[0]} is {int(inputs[shorter[0]])}, but rows have {shape[1]} tokens: say where sequences "
                "begin (position_ids, seq_idx or cu_seq_lens_q)."
            )
    return Rows(shape, real)


@torch.compiler.disable
def _starts(forms: dict[str, Any], shape: tuple[int, int], real: Tensor | None) -> Tensor | None:
    """Where sequences begin inside rows, (B, T), from the arguments that describe it; None if none begins."""
    by_form: dict[str, Tensor] = {}
    for name, value in forms.items():
        if name in BORDERS:
            by_form[name] = _begins(name, value, shape, real)
            continue
        numbers = checked_numbers(name, value, shape)
        if shape[1] > 1:  # else a step of generation: nothing begins inside a row
            by_form[name] = _restarts(numbers, real) if name == "position_ids" else changes(numbers, real)
    starts: Tensor | None = None
    for name, one in by_form.items():
        starts = one if starts is None else starts.to(one.device)
        if not torch.equal(starts, one):
            raise ValueError(f"{next(iter(by_form))} and {name} begin sequences at different tokens: leave one out.")
    return starts if starts is not None and bool(starts.any()) else None


def check_prompts(inputs: Mapping[str, Any]) -> None:
    """Refuse what tells sequences apart in prompts, and `generate` cannot extend token by token: all but positions."""
    if wrong := [name for name in LAYOUT[2:] if inputs.get(name) is not None]:
        raise ValueError(f"generate takes one sequence per row, and no {' and no '.join(wrong)}: unpack the rows.")


def token_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """(B, T). Raises a `ValueError` unless there is exactly one of both, with tokens."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    batch_size, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
    if 0 in (batch_size, length):
        raise ValueError(f"The input has no tokens ({batch_size} rows of {length}): give at least one of each.")
    return batch_size, length


def mask_of_new_tokens(mask: Any, seen: int, shape: tuple[int, int]) -> Tensor | None:
    """The last T columns of a mask, (B, T), or (B, seen + T) with the `seen` tokens before."""
    if mask is None:
        return None
    whole = (shape[0], seen + shape[1])
    if not isinstance(mask, Tensor) or mask.shape not in (shape, whole):
        past = f", or with the tokens that the cache has read {whole}" if seen else ""
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have the shape of the tokens, {shape}{past}, got {found}.")
    return mask if mask.shape == shape else mask[:, seen:]


def real_tokens(mask: Tensor | None) -> Tensor | None:
    """(B, T), true at real tokens; None if all are. Raises a `ValueError` for a mask of other values than 0 and 1."""
    if mask is None:
        return None
    real, message = mask.bool(), "attention_mask must hold 1 at real tokens and 0 at padding only."
    if torch.compiler.is_compiling():
        if mask.dtype != torch.bool:  # the only refusal that a compiled graph can hold
            torch._assert_async((mask == real).all(), message)
        return real
    if mask.dtype != torch.bool and not bool((mask == real).all()):
        raise ValueError(message)
    return None if bool(real.all()) else real


def checked_numbers(name: str, values: Any, shape: tuple[int, int]) -> Tensor:
    """Integers of shape (B, T), from (B, T) or (1, T)."""
    integers = isinstance(values, Tensor) and not values.is_floating_point() and values.dtype != torch.bool
    if not integers or values.shape not in (shape, (1, shape[1])):
        found = (
            f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        )
        raise ValueError(f"{name} must be integers of the shape of the tokens, {shape}, got {found}.")
    return values.expand(shape)


def _begins(name: str, borders: Any, shape: tuple[int, int], real: Tensor | None) -> Tensor:
    """Where sequences begin inside rows (B, T), from their borders among all tokens."""
    rows, length = shape
    starts: Tensor | None = None
    fits = real is None and isinstance(borders, Tensor) and borders.ndim == 1 and borders.numel() > 1
    fits = fits and not borders.is_floating_point() and borders[0] == 0 and borders[-1] == rows * length
    if fits and bool((borders.diff() >= 0).all()):
        starts = torch.zeros(rows * length + 1, dtype=torch.bool, device=borders.device)
        starts = starts.index_fill(0, borders.long(), True)[:-1].view(shape)
    if starts is None or not bool(starts[:, 0].all()):
        raise ValueError(
            f"{name} must count up from 0 to {rows * length}, the number of tokens, with a border between rows and no "
            "padding: leave it out, and give position_ids that restart where sequences begin."
        )
    starts[:, 0] = False
    return starts


def _previous(values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The value at the real token before each token, how many places back it is, and which real tokens have one."""
    places = torch.arange(values.shape[1], device=values.device).expand_as(values)
    real = torch.ones_like(values, dtype=torch.bool) if real is None else real
    last_real = places.masked_fill(~real, -1).cummax(1).values
    before = pad(last_real[:, :-1], (1, 0), value=-1)
    return values.gather(1, before.clamp(min=0)), places - before, real & (before >= 0)


def _restarts(positions: Tensor, real: Tensor | None) -> Tensor:
    """Where positions restart: at 0, or at the first position of the row."""
    previous, distance, followed = _previous(positions, real)
    step = positions - previous
    starts = followed & (step != 1) & (step != distance)  # padding may be counted or not
    first = positions if real is None else positions.gather(1, real.long().argmax(1, keepdim=True))
    wrong = (starts & (positions != 0) & (positions != first[:, :1])).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise ValueError(
            f"position_ids goes from {int(previous[row, place])} to {int(positions[row, place])} at token {place} of "
            f"row {row}: a recurrent model reads tokens in order, so positions must count up by one, or restart "
            "for a new sequence, at 0 or at the first position of the row."
        )
    return starts


def changes(numbers: Tensor, real: Tensor | None) -> Tensor:
    """Where the numbers of sequences go up."""
    previous, _, followed = _previous(numbers, real)
    if bool((followed & (numbers < previous)).any()):
        raise ValueError("seq_idx goes down: a recurrent model cannot return to an earlier sequence of the row.")
    return followed & (numbers > previous)
