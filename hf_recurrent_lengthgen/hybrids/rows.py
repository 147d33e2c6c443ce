"""Rows with padding, and rows of several sequences, read by stock models as rows without them.

No token of a causal model sees what comes after it. So the tokens of each sequence move to the front of a row of
their own, the stock model reads these rows without a mask, at positions from 0, and its outputs move back. Only a
state after the tokens would see the padding at the end of the shorter rows; the mixers keep it from that.

Shapes: B rows and T tokens of the call; N sequences, L tokens of the longest one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.registry import check_uses
from hf_recurrent_lengthgen.models.modeling_heads import IGNORED_LABEL, scored_labels
from hf_recurrent_lengthgen.models.rows import LAYOUT, Rows, read_rows
from hf_recurrent_lengthgen.models.rows_moved import MovedRows
from hf_recurrent_lengthgen.models.state_value import RecurrentState

TOKENS, TARGETS = ("input_ids", "inputs_embeds"), ("labels", "shift_labels")
UNREAD = ("document_ids", "segment_ids", "sequence_ids", "seq_lengths")
PER_TOKEN, PER_CALL = ("logits", "last_hidden_state"), ("loss", "aux_loss")


class StockRows:
    """How the rows of one call become those that a stock model reads, and back.

    Args:
        layout: The rows of the call, with padding or several sequences.

    Attributes:
        moved: The one group of the N sequences.
        rows: N.
        length: L.
        padded: The N rows, if some have padding at their ends; None if all sequences have L tokens.
    """

    def __init__(self, layout: Rows) -> None:
        self.layout = layout
        self.moved = MovedRows.of_sequences(layout, together=True)
        (self.padded,) = self.moved.groups
        self.rows, self.length = self.moved.orders[0].shape
        self._chosen: Tensor | None = None

    def to_front(self, x: Tensor) -> Tensor:
        """(B, T, ...) to (N, L, ...), with zeros behind shorter sequences."""
        moved = self.moved.to_front(x.flatten(2) if x.ndim > 2 else x[..., None])[0]
        return moved.view(self.rows, self.length, *x.shape[2:])

    def back(self, x: Tensor) -> Tensor:
        """(N, L, ...) to (B, T, ...); a padding position repeats the last real token before it."""
        return x.flatten(0, 1)[self.moved.source]

    def starting(self, state: RecurrentState, new: RecurrentState | None) -> RecurrentState:
        """The states of the N sequences: that of its row for the first one of a row, `new` for others.

        `new` has one row; None is zero.
        """
        news = (None,) * len(state) if new is None else new
        return tuple(self.moved.starting_states(*layers)[0] for layers in zip(state, news, strict=True))

    def final(self, after: RecurrentState) -> RecurrentState:
        """The states after the last sequence of each row, from those after the N sequences."""
        return tuple(self.moved.final_states((layer,)) for layer in after)

    def keys(self, cache: HybridCache | None) -> HybridCache | None:
        """Keys and values before the N sequences: those of its row for the first one of a row, none for others."""
        if cache is None:
            return None
        (owners,), rows = self.moved.owners, len(self.moved.last)
        lengths = cache.row_lengths(owners.device, rows)
        read = cache.taken(owners.clamp(max=rows - 1))
        read.lengths = torch.cat([lengths, lengths.new_zeros(1)])[owners]
        return read

    def arguments(self, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the N rows, without targets, since `loss` gets the logits that moved back."""
        left_out = {*LAYOUT, *TARGETS, "num_items_in_batch"}
        moved = {name: value for name, value in arguments.items() if name not in left_out and value is not None}
        moved |= {name: self.to_front(moved[name]) for name in TOKENS if name in moved}
        self._keep(model, moved, any(arguments.get(name) is not None for name in TARGETS))
        if experts_counted(arguments, model.config):
            # the loss of experts counts the tokens of this mask
            real: Any = torch.ones_like(self.moved.orders[0]) if self.padded is None else self.padded.real
            check_uses(model, {"a row without a real token": not bool(real[:, 0].all()), "output_router_logits": True})
            moved["attention_mask"] = real.long()
        known = {*TOKENS, "logits_to_keep", "attention_mask"}
        other = [name for name, x in moved.items() if name not in known and isinstance(x, Tensor) and x.ndim > 1]
        if other:
            raise ValueError(
                f"{other} cannot be used in a call with padding or several sequences in a row: leave them out. "
                "attention_mask says which tokens are real, position_ids or seq_idx where sequences begin."
            )
        return moved

    def _keep(self, model: Any, moved: dict[str, Any], has_targets: bool) -> None:
        """Let `logits_to_keep` ask for the places, in the N rows, of the tokens that it names in the B rows."""
        keep = moved.get("logits_to_keep", 0)
        if isinstance(keep, int) and keep == 0:
            return
        check_uses(model, {"logits_to_keep": True, "labels": has_targets})
        self._chosen = self.moved.source[:, slice(-keep, None) if isinstance(keep, int) else keep]
        moved["logits_to_keep"] = self._places = (self._chosen % self.length).unique()

    def output(self, output: ModelOutput) -> dict[str, Any]:
        """The entries of an output of the stock model for the B rows."""
        moved = dict(output)
        for name, value in output.items():
            if name == "logits" and self._chosen is not None:
                columns = self._chosen % self.length
                if value.shape[1] == len(self._places):  # else the model keeps all logits, as xLSTM does
                    columns = torch.searchsorted(self._places, columns)
                moved[name] = value[self._chosen // self.length, columns]
            elif name in PER_TOKEN:
                moved[name] = self.back(value)
            elif name == "hidden_states":
                moved[name] = tuple(None if x is None else self.back(x) for x in value)  # of chosen layers
            elif name == "router_logits":  # (N L, experts) of each layer
                moved[name] = tuple(
                    self.back(x.view(self.rows, self.length, -1)).reshape(-1, *x.shape[x.ndim - 1 :]) for x in value
                )
            elif name not in PER_CALL and _has_tensors(value):
                raise ValueError(
                    f"{type(output).__name__} has {name}, which cannot be moved back to rows with padding."
                )
        return moved

    def loss(self, model: Any, output: dict[str, Any], arguments: dict[str, Any]) -> Tensor:
        """The loss as the stock model computes it, from logits and targets of the B rows."""
        targets = {
            name: arguments[name] for name in (*TARGETS, "num_items_in_batch") if arguments.get(name) is not None
        }
        for name in targets.keys() & {*TARGETS}:
            if targets[name].shape != self.layout.shape:
                raise ValueError(f"{name} must have shape {self.layout.shape}, got {tuple(targets[name].shape)}.")
        if "shift_labels" in targets:
            shifted = scored_labels(targets["shift_labels"], self.layout, shifted=True).contiguous()
            targets |= {"labels": shifted, "shift_labels": shifted}
        else:
            targets["labels"] = scored_labels(targets["labels"], self.layout)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        logits: Tensor = output["logits"]
        loss: Tensor = model.loss_function(logits=logits, vocab_size=vocabulary, **targets)
        if z_loss_coefficient := getattr(model, "z_loss_coefficient", 0):  # Bamba's, here without padding
            real = logits if self.layout.real is None else logits[self.layout.real]
            loss = loss + z_loss_coefficient * real.logsumexp(-1).to(loss.dtype).pow(2).mean()
        return with_loss_of_experts(model, loss, output)


def read_stock(
    model: Any, forward: Any, rows: StockRows | None, arguments: dict[str, Any], further: Any
) -> ModelOutput:
    """The output of a stock model, which has this `forward`, for the B rows; `further` arguments are of N rows."""
    if rows is None:
        return forward(**of_whole_rows(arguments, ()), **further)
    output = forward(**rows.arguments(model, arguments) | further)
    entries = rows.output(output)
    if any(arguments.get(name) is not None for name in TARGETS):
        entries = {"loss": rows.loss(model, entries, arguments)} | entries
    return type(output)(**entries)


def with_loss_of_experts(model: Any, loss: Tensor, output: Mapping[str, Any]) -> Tensor:
    """The loss with that of the experts in an output, as stock models add it."""
    of_experts = output.get("aux_loss")
    return loss if of_experts is None else loss + (_coefficient(model) * of_experts).to(loss.device)


def experts_counted(arguments: dict[str, Any], config: Any) -> bool:
    """Whether a call computes the loss of experts."""
    value = arguments.get("output_router_logits")
    return bool(getattr(config, "output_router_logits", False) if value is None else value)


def uncounted(arguments: dict[str, Any], config: Any) -> dict[str, bool]:
    """Further arguments for a call without the loss of experts, which `generate` has no use for."""
    return {"output_router_logits": False} if experts_counted(arguments, config) else {}


def _coefficient(model: Any) -> float:
    """Of the loss of experts, where the stock model has it: those of images and text read that of their config."""
    owner = model if hasattr(model, "router_aux_loss_coef") else model.config.get_text_config(decoder=True)
    return float(owner.router_aux_loss_coef)


def scale_router_loss(model: Any, call: Callable[[Any], Any], arguments: dict[str, Any]) -> Any:
    """The output of a call, whose router loss is scaled by its share of the `num_items_in_batch` targets.

    Stock models add the whole router loss, a mean over tokens, so it would grow with the number of micro-batches.
    """
    items = arguments.get("num_items_in_batch")
    if items is None:
        return call(arguments)
    output = call(arguments | {"return_dict": True})
    loss, of_experts = (output.get(name) for name in PER_CALL)
    if loss is not None and of_experts is not None:
        rest = 1 - _targets(arguments) / items
        output["loss"] = loss - (rest * _coefficient(model) * of_experts).to(loss.device)
    return output if model._wants_dict(arguments) else output.to_tuple()


def _targets(arguments: dict[str, Any]) -> Tensor:
    """The number of targets that a call scores."""
    shifted = arguments.get("shift_labels") is not None
    labels, mask = arguments["shift_labels" if shifted else "labels"], arguments.get("attention_mask")
    rows = rows_of(arguments, 0 if mask is None else mask.shape[1] - labels.shape[1])
    labels = labels if rows is None else scored_labels(labels, rows.layout, shifted)
    return (labels[:, 0 if shifted else 1 :] != IGNORED_LABEL).sum()


def rows_of(arguments: dict[str, Any], seen: int = 0) -> StockRows | None:
    """How the rows of a call are moved; None if each is one sequence of real tokens.

    Args:
        arguments: Of the call.
        seen: Tokens before those of the call, for which a mask may have columns of ones, too.

    Raises:
        ValueError: as in `read_rows`.
    """
    if all(arguments.get(name) is None for name in LAYOUT):
        return None
    return _rows_of(arguments, seen)


@torch.compiler.disable
def _rows_of(arguments: dict[str, Any], seen: int) -> StockRows | None:
    rows = read_rows(arguments | {"position_ids": text_positions(arguments.get("position_ids"))}, seen)
    return None if rows.real is None and rows.starts is None else StockRows(rows)


def text_positions(positions: Any) -> Any:
    """(B, T) from `position_ids` of M-RoPE, (time,) time, height and width, whose planes are equal for text.

    Those of images stay as they are, and are refused for their shape.
    """
    planes = isinstance(positions, Tensor) and positions.ndim == 3 and positions.shape[0] in (3, 4)
    return positions[0] if planes and bool((positions[1:] == positions[:1]).all()) else positions


def refuse_unread(arguments: dict[str, Any]) -> None:
    """Refuse other names for the sequences of packed rows, which stock models take without reading them."""
    names = [name for name, x in arguments.items() if x is not None and name not in LAYOUT]
    if wrong := [name for name in names if "cu_seq" in name or name.endswith(UNREAD)]:
        raise ValueError(f"{wrong} are not read: say where sequences begin by {', '.join(LAYOUT[:4])}.")


def of_whole_rows(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call for rows of whole sequences, with those 2-D tensors of `names` that describe rows."""
    chosen = {name: value for name, value in arguments.items() if name not in LAYOUT}
    for name in names:
        value = arguments.get(name)
        value = text_positions(value) if name == "position_ids" else value
        if isinstance(value, Tensor) and value.ndim == 2:
            chosen[name] = value
    return chosen


def reads_tokens(model: Any) -> bool:
    """Whether the outputs of a model are those of tokens: of a backbone, or of a language model."""
    return model.base_model is model or model.get_output_embeddings() is not None


def check_positions(positions: Any, rows: StockRows | None, expected: Tensor) -> None:
    """Raise a `ValueError` if positions are not those `expected`, (N or 1, L), of the rows of the stock model."""
    if positions is None:
        return
    positions = text_positions(positions)
    wrong = positions != (expected if rows is None else rows.back(expected.expand(rows.rows, -1)))
    if rows is not None and rows.layout.real is not None:
        wrong = wrong & rows.layout.real
    if bool(wrong.any()):
        first = " or ".join(map(str, expected[:, 0].unique().tolist()))
        raise ValueError(
            f"position_ids must count the real tokens of each sequence from {first}: leave them out, or let them "
            "restart at 0 where a new sequence begins in a row."
        )


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(_has_tensors, value)))
