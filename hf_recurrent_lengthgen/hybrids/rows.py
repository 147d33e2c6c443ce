"""Rows with padding, and rows of several sequences, read by stock models as rows without them.

No token of a causal model sees what comes after it. So the tokens of each sequence move to the front of a row of
their own, the stock model reads these rows without a mask, at positions from 0, and what it gives moves back. Only a
state after the tokens would see the padding at the end of the shorter rows; `stopping.py` keeps it from that.

Shapes: B rows and T tokens as given; N sequences, L tokens of the longest one.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_recurrent_lengthgen.models.packed_rows import PACKING_KEYS, Packing
from hf_recurrent_lengthgen.models.recurrent_state import RecurrentState, layer_state
from hf_recurrent_lengthgen.models.token_inputs import (
    mask_of_new_tokens,
    real_tokens,
    scored_labels,
    starts_inside_rows,
    token_shape,
)

TOKENS, TARGETS = ("input_ids", "inputs_embeds"), ("labels", "shift_labels")
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")  # of sequences, for kernels of attention, as collators give them
LAYOUT = ("attention_mask", *PACKING_KEYS, *BORDERS, "max_length_q", "max_length_k")
DROPPED = {*LAYOUT} - {"position_ids"}  # what says nothing about rows that are not moved
PER_TOKEN, PER_CALL = ("logits", "last_hidden_state"), ("loss", "aux_loss")

_reading: ContextVar[Any] = ContextVar("reading", default=None)


class Rows:
    """How the rows of one call become those that a stock model reads, and back.

    Args:
        shape: (B, T).
        real: (B, T) bool, true at real tokens; None if all are.
        starts: (B, T) bool, where sequences begin inside rows; None if none does. Not both are None.

    Attributes:
        rows: N.
        length: L.
        lengths: Tokens of each sequence, (N,); None if all have L.
    """

    def __init__(self, shape: tuple[int, int], real: Tensor | None, starts: Tensor | None) -> None:
        self.shape, self.real, self.starts = shape, real, starts
        given: Any = starts if real is None else real
        inside = torch.zeros_like(given) if starts is None else starts
        self._packing = Packing.from_starts(inside, torch.ones_like(given) if real is None else real, together=True)
        self._valid, self.lengths = self._packing.valid[0], self._packing.lengths[0]
        self.rows, self.length = self._valid.shape
        self._source = self._packing.source
        self._kept: Tensor | None = None
        self._latest: tuple[Any, Any] = (None, None)

    @property
    def positions(self) -> Tensor:
        """Of each token in its sequence, (B, T); padding has that of the last real token before it."""
        return self._source % self.length

    def to_front(self, x: Tensor) -> Tensor:
        """(B, T, ...) to (N, L, ...), with zeros behind shorter sequences."""
        moved = self._packing.to_front(x.flatten(2) if x.ndim > 2 else x[..., None])[0]
        return moved.view(self.rows, self.length, *x.shape[2:])

    def back(self, x: Tensor) -> Tensor:
        """(N, L, ...) to (B, T, ...); a padding position repeats the last real token before it."""
        if self._latest[0] is not x:  # logits are moved for the loss, then for the output
            self._latest = x, x.flatten(0, 1)[self._source]
        moved: Tensor = self._latest[1]
        return moved

    def starting(self, state: RecurrentState, new: RecurrentState | None) -> RecurrentState:
        """The states of the N sequences: that of its row for the first one of a row, `new` for others.

        `new` has one row; None is zero.
        """
        news = (None,) * len(state) if new is None else new
        return tuple(self._packing.starting_states(*layers)[0] for layers in zip(state, news, strict=True))

    def final(self, before: RecurrentState, after: RecurrentState) -> RecurrentState:
        """The states after the last sequence of each row, from those before and after the N sequences."""
        if self.length == 1 and self.lengths is not None:  # the step for one token does not know of empty rows
            real = self.lengths > 0
            after = tuple(
                layer_state(
                    torch.where(real.view(-1, *[1] * (old.ndim - 1)), new, old)
                    for old, new in zip(*layers, strict=True)
                )
                for layers in zip(before, after, strict=True)
            )
        return tuple(self._packing.final_states((layer,)) for layer in after)

    def arguments(self, given: dict[str, Any], config: Any) -> dict[str, Any]:
        """The arguments for the N rows; targets stay as they are, since `loss` gets the logits that moved back.

        Raises:
            ValueError: for what cannot be moved.
        """
        moved = {name: value for name, value in given.items() if name not in LAYOUT}
        for name in TOKENS:
            if moved.get(name) is not None:
                moved[name] = self.to_front(moved[name])
        for name in TARGETS:
            if moved.get(name) is not None and moved[name].shape != self.shape:
                raise ValueError(f"{name} must have shape {self.shape}, got {tuple(moved[name].shape)}.")
        if moved.get("shift_labels") is not None:
            moved["labels"] = moved["shift_labels"]  # without them, stock models compute no loss
        self._keep(moved)
        wants = {name for name in ("output_attentions", "output_router_logits") if _asked(name, given, config)}
        if "output_attentions" in wants:
            raise ValueError("output_attentions cannot be given for rows with padding or of several sequences.")
        if wants:  # the loss of experts counts the tokens of this mask
            if self.lengths is not None and bool((self.lengths == 0).any()):
                raise ValueError("A row has no real token, which output_router_logits does not take: leave it out.")
            moved["attention_mask"] = self._valid.long()
        known = {*TOKENS, *TARGETS, "logits_to_keep", "attention_mask"}
        other = [name for name, x in moved.items() if name not in known and isinstance(x, Tensor) and x.ndim > 1]
        if other:
            raise ValueError(
                f"{other} cannot be used in a call with padding or several sequences in a row: leave them out. "
                "attention_mask says which tokens are real, position_ids or seq_idx where sequences begin."
            )
        return moved

    def _keep(self, moved: dict[str, Any]) -> None:
        """Let `logits_to_keep` ask for the places, in the N rows, of the tokens that it names in the B rows."""
        keep = moved.get("logits_to_keep", 0)
        if isinstance(keep, int) and keep == 0:
            return
        if any(moved.get(name) is not None for name in TARGETS):
            raise ValueError("labels need all logits: drop logits_to_keep.")
        if isinstance(keep, Tensor) and keep.ndim != 1:
            raise ValueError(
                f"logits_to_keep of shape {tuple(keep.shape)} cannot be used with padding or several sequences in a "
                "row: give a number, or the positions of the tokens, (K,)."
            )
        self._kept = self._source[:, -keep:] if isinstance(keep, int) else self._source[:, keep]
        moved["logits_to_keep"] = (self._kept % self.length).unique()
        self._places = moved["logits_to_keep"]

    def output(self, output: ModelOutput) -> dict[str, Any]:
        """The entries of an output of the stock model for the B rows."""
        moved = dict(output)
        for name, value in output.items():
            if name == "logits" and self._kept is not None:
                columns = self._kept % self.length
                if value.shape[1] == len(self._places):  # else the model keeps all logits, as xLSTM does
                    columns = torch.searchsorted(self._places, columns)
                moved[name] = value[self._kept // self.length, columns]
            elif name in PER_TOKEN:
                moved[name] = self.back(value)
            elif name == "hidden_states":
                moved[name] = tuple(self.back(x) for x in value)
            elif name == "router_logits":  # (N L, experts) of each layer
                moved[name] = tuple(
                    self.back(x.view(self.rows, self.length, -1)).reshape(-1, *x.shape[x.ndim - 1 :]) for x in value
                )
            elif name not in PER_CALL and _has_tensors(value):
                raise ValueError(
                    f"{type(output).__name__} has {name}, which cannot be moved back to rows with padding."
                )
        return moved

    def read(self, forward: Callable[..., ModelOutput], arguments: dict[str, Any], config: Any) -> ModelOutput:
        """The output of a stock model for the N rows, with the loss of the B rows."""
        token = _reading.set(self)
        try:
            return forward(**self.arguments(arguments, config))
        finally:
            _reading.reset(token)

    def loss(self, stock: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **options: Any) -> Tensor:
        """The loss of a stock model from the logits of the N rows and the targets of the B rows."""
        if (shifted := options.get("shift_labels")) is not None:
            options["shift_labels"] = scored_labels(shifted, self.real, self.starts, shifted=True).contiguous()
        else:
            labels = scored_labels(labels, self.real, self.starts)
        return stock(self.back(logits), labels, *args, **options)


def loss_of(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss function of a model while it reads: the stock one, with logits moved back if rows were moved."""
    rows = _reading.get()
    return stock if rows is None else functools.partial(rows.loss, stock)


@torch.compiler.disable
def rows_of(arguments: dict[str, Any], seen: int = 0) -> Rows | None:
    """How the rows of a call are moved; None if each is one sequence of real tokens.

    Args:
        arguments: Of the call.
        seen: Tokens before those of the call, for which a mask may have columns of ones, too.

    Raises:
        ValueError: for wrong masks, and positions that neither count up nor restart.
    """
    shape = token_shape(arguments.get("input_ids"), arguments.get("inputs_embeds"))
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise ValueError(
            "attention_mask is not of shape (B, T): give 1 at real tokens and 0 at padding, and position_ids or "
            "seq_idx for rows of several sequences."
        )
    real = real_of(mask, shape, seen)
    starts = starts_inside_rows({name: arguments.get(name) for name in PACKING_KEYS}, shape, real)
    for name in BORDERS:
        if (borders := arguments.get(name)) is not None:
            starts = _starts_at(name, borders, shape, real, starts)
    return None if real is None and starts is None else Rows(shape, real, starts)


def real_of(mask: Tensor | None, shape: tuple[int, int], seen: int = 0) -> Tensor | None:
    """(B, T), true at real tokens; None if all are. Raises a `ValueError` for a wrong mask."""
    wide = mask is not None and mask.shape == (shape[0], seen + shape[1])
    if mask is not None and wide and bool((mask[:, :seen] == 1).all()):
        mask = mask[:, seen:]
    return real_tokens(mask_of_new_tokens(mask, None, shape))


def _starts_at(name: str, borders: Any, shape: tuple[int, int], real: Tensor | None, starts: Any) -> Tensor | None:
    """Where sequences begin inside rows (B, T), from the borders of sequences among all tokens.

    Raises:
        ValueError: for borders that do not fit the rows, or contradict positions, whose `starts` are given.
    """
    rows, length = shape
    found: Any = None
    fits = real is None and isinstance(borders, Tensor) and borders.ndim == 1 and borders.numel() > 1
    if fits and borders[0] == 0 and borders[-1] == rows * length and bool((borders.diff() > 0).all()):
        found = torch.zeros(rows * length, dtype=torch.bool, device=borders.device)
        found = found.index_fill(0, borders[:-1].long(), True).view(shape)
    if found is None or not bool(found[:, 0].all()):
        raise ValueError(
            f"{name} must count up from 0 to {rows * length}, the number of tokens, with a border between rows and no "
            "padding: leave it out, and give position_ids that restart where sequences begin."
        )
    found[:, 0] = False
    if starts is not None and not torch.equal(found, starts.to(found.device)):
        raise ValueError(f"{name} and position_ids (or seq_idx) begin sequences at different tokens: leave one out.")
    return found if bool(found.any()) else None


def plain_rows(model: Any, cache_argument: str, arguments: dict[str, Any]) -> Rows | None:
    """`rows_of` a call without states; None also for what stays with the stock model.

    That are calls with a cache, other heads than that of a language model, and masks of other shapes.
    """
    given = {name: arguments[name] for name in LAYOUT if arguments.get(name) is not None}
    special = arguments.get(cache_argument) is not None
    tables = [given[name] for name in ("attention_mask", *PACKING_KEYS) if name in given]
    special |= any(not isinstance(x, Tensor) or x.ndim != 2 for x in tables)
    special |= (arguments.get("input_ids") is None) == (arguments.get("inputs_embeds") is None)
    if not given or special or arguments.get("use_cache") or not reads_tokens(model):
        return None
    if (rows := rows_of(arguments)) is not None and model.attends:
        check_positions(arguments.get("position_ids"), rows, 0)
    return rows


def reads_tokens(model: Any) -> bool:
    """Whether the outputs of a model are those of tokens: of a backbone, or of a language model."""
    return model.base_model is model or model.get_output_embeddings() is not None


def check_positions(positions: Tensor | None, rows: Rows | None, first: int) -> None:
    """Raise a `ValueError` if positions are not those from which attention layers start, at `first`."""
    if positions is None:
        return
    expected = rows.positions if rows is not None else torch.arange(positions.shape[-1], device=positions.device)
    wrong = positions != expected + first
    if rows is not None and rows.real is not None:
        wrong = wrong & rows.real
    if bool(wrong.any()):
        raise ValueError(
            f"position_ids must count the real tokens of each sequence from {first}: leave them out, or let them "
            "restart at 0 where a new sequence begins in a row."
        )


def _asked(name: str, arguments: dict[str, Any], config: Any) -> bool:
    given = arguments.get(name)
    return bool(getattr(config, name, False) if given is None else given)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(_has_tensors, value)))
