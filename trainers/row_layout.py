"""How the rows of a batch become the rows that the model sees, and back.

Truncated backpropagation resets states at given tokens; the alignment loss runs two crops of every row. Both only
change the rows of the model, so a source of initial states still sees one state per row of the batch.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DataCollatorWithPadding, default_data_collator

from hf_recurrent_lengthgen.models.recurrent_state import (
    RecurrentState,
    concatenate_rows,
    map_state,
    take_rows,
)
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace

MICRO_BATCH = "micro_batch_facts"
"""The key of a `MicroBatch` in the inputs, between `get_batch_samples` and `compute_loss`."""


@dataclass(frozen=True)
class RowLayout:
    """B rows of a batch as R rows of the model.

    Attributes:
        rows: R.
        first: Row of the model that starts row i of the batch, (B,); None if the rows are the same.
        last: Row of the model that ends row i of the batch, (B,).
        crops: Number of crops of each row; final states are those of the first crop.
        later_from_zero: Whether crops after the first start from zero instead of the state of the first.
    """

    rows: int
    first: Tensor | None = None
    last: Tensor | None = None
    crops: int = 1
    later_from_zero: bool = False

    def scatter(self, state: RecurrentState | None) -> RecurrentState | None:
        """Initial states for the R rows of the model from those of the B rows of the batch."""
        if state is None:
            return None
        if self.first is not None:
            first = self.first

            def place_rows(part: Tensor) -> Tensor:
                return part.new_zeros(self.rows, *part.shape[1:]).index_copy(0, first.to(part.device), part)

            state = map_state(place_rows, state)
        later = map_state(torch.zeros_like, state) if self.later_from_zero else state
        return concatenate_rows([state, *[later] * (self.crops - 1)]) if self.crops > 1 else state

    def gather(self, state: RecurrentState) -> RecurrentState:
        """Final states of the B rows of the batch from those of the R rows of the model."""
        if self.last is not None:
            return take_rows(state, self.last)
        return take_rows(state, slice(self.rows // self.crops)) if self.crops > 1 else state


@dataclass
class MicroBatch:
    """What is known of a micro-batch. (Not a tuple: Trainer rebuilds tuples when it moves a batch to the device.)

    Attributes:
        place: Its place in the run.
        layout: How its rows become those of the model.
        crop_loss: Its loss (`CropLoss`), if rows are cropped.
        is_trained: Whether the loss was computed.
        is_last: Whether weights change after it.
        sequences: Their number, if some begin inside rows, from zero; None if each row is one.
    """

    place: BatchPlace
    layout: RowLayout
    crop_loss: Any = None
    is_trained: bool = False
    is_last: bool = True
    sequences: int | Tensor | None = None

    @property
    def where(self) -> str:
        return f"step {self.place.step}, micro-batch {self.place.micro_batch}"


def refuse_packed(trainer: str) -> NoReturn:
    """Raise a `ValueError` for packed rows where each row continues that of the step before."""
    raise ValueError(
        f"{trainer} gets rows that continue those of the step before, but several sequences are packed into a row: "
        "leave data_collator out. reset_at_document of the data begins documents inside rows."
    )


def without_padding(collator: Any) -> Any:
    """The collator; one without padding instead of Trainer's default if the tokenizer has no pad token."""
    lacks = type(collator) is DataCollatorWithPadding and collator.tokenizer.pad_token is None
    return _collate_equal_rows if lacks else collator


def _collate_equal_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = sorted({len(row["input_ids"]) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"The rows of a batch have {lengths} tokens, and the tokenizer has no pad token to pad them with: give "
            "rows of one length, or a data_collator and a pad token (tokenizer.pad_token = tokenizer.eos_token)."
        )
    batch: dict[str, Any] = default_data_collator(rows)
    return batch


def zero_rows(state: RecurrentState | None) -> tuple[Tensor, Tensor]:
    """Share of the rows of a batch that start from zero, and whether any of them has NaN or infinite values."""
    if state is None:
        return torch.ones(()), torch.zeros((), dtype=torch.bool)
    largest = torch.stack(
        [
            torch.linalg.vector_norm(part.detach().flatten(1), torch.inf, 1)
            for layer in state
            for part in layer
            if part[0].numel()
        ]
    )
    return (largest == 0).all(0).double().mean(), ~largest.isfinite().all()
