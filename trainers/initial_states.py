"""Where the initial state of a training sequence comes from: small value classes, without a Trainer.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 4: every intervention only chooses h_{-1} during training. A
source returns the initial states of a batch before the forward pass and sees the final states after it.

Random choices are keyed by (seed, step, micro-batch, global row), independent of the distribution of sequences over
processes: two processes with two sequences each make the choices of one process with four.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import (
    RecurrentState,
    concatenate_rows,
    map_state,
    state_batch_size,
    take_rows,
)

MICRO_BATCH = "micro_batch_facts"
"""The key of a `MicroBatch` in the inputs, between `get_batch_samples` and `training_step`."""


def keyed_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose numbers depend on `key` only."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class BatchPlace:
    """The place of a micro-batch in the run.

    Attributes:
        seed: Seed of the run.
        step: Optimizer step, from 0.
        micro_batch: Micro-batch within the step under gradient accumulation, from 0.
        first_row: Global number of the first row: rows per process times the index of the process, or of the group of
            processes that split sequences.
        rows: Rows in this micro-batch.
        continues: Rows that continue the text of the previous step, (rows,) bool; None for all rows. The other rows do
            not start from carried states.
    """

    seed: int
    step: int
    micro_batch: int
    first_row: int
    rows: int
    continues: Tensor | None = field(default=None, compare=False)

    def row_generator(self, row: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator for one row (0 to rows - 1) and purpose, the same for any number of processes."""
        return keyed_generator(self.seed, self.step, self.micro_batch, self.first_row + row, purpose, device=device)

    def uniform(self, purpose: str) -> Tensor:
        """One number in [0, 1) for each row, (rows,)."""
        return torch.stack([torch.rand((), generator=self.row_generator(row, purpose)) for row in range(self.rows)])


@dataclass(frozen=True)
class RowLayout:
    """B rows of a batch as B rows of the model, or as several crops of each.

    Attributes:
        crops: Number of crops of each row; final states are those of the first crop.
        later_from_zero: Whether crops after the first start from zero instead of the state of the first.
    """

    crops: int = 1
    later_from_zero: bool = False

    def scatter(self, state: RecurrentState | None) -> RecurrentState | None:
        """Initial states for the rows of the model from those of the B rows of the batch."""
        if state is None or self.crops == 1:
            return state
        later = map_state(torch.zeros_like, state) if self.later_from_zero else state
        return concatenate_rows([state, *[later] * (self.crops - 1)])

    def gather(self, state: RecurrentState) -> RecurrentState:
        """Final states of the B rows of the batch from those of the rows of the model."""
        return state if self.crops == 1 else take_rows(state, slice(state_batch_size(state) // self.crops))


@dataclass
class MicroBatch:
    """Facts about a micro-batch.

    Attributes:
        place: Its place in the run.
        length: Length of its rows, with padding.
        tokens: Real tokens of its rows.
        layout: How its rows become those of the model.
        crop_loss: Its loss (`CropLoss`), if rows are cropped.
        is_trained: Whether the loss was computed.
        is_last: Whether weights change after it.
        sequences: Number of sequences, if some begin inside rows, from zero; None if each row is one.
        windows: For rows that are read in windows, of each whether it has a target in any process, and whether it has
            padding; else None.
        carried: Of a window, the final state of the one before; None for the state of the source.
        keys: Of a window, the cache with the keys and values of those before; None without attention layers.
        ends: Of a window, whether its final states are those of the rows.
    """

    place: BatchPlace
    length: int
    tokens: int | Tensor
    layout: RowLayout
    crop_loss: Any = None
    is_trained: bool = False
    is_last: bool = True
    sequences: int | Tensor | None = None
    windows: list[list[bool]] | None = None
    carried: RecurrentState | None = None
    keys: Any = None
    ends: bool = True

    def to(self, *_: Any, **__: Any) -> "MicroBatch":
        """Itself, as inputs are moved one by one."""
        return self

    @property
    def where(self) -> str:
        return f"step {self.place.step}, micro-batch {self.place.micro_batch}"


class InitialStateSource(ABC):
    """Returns the initial states of training batches and sees their final states.

    Its public attributes are its settings: numbers and strings that a resumed run must share.
    """

    always_zero: ClassVar[bool] = False
    """Whether every sequence starts from zero, and no state is passed on."""
    sum_over_processes: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)
    """Adds a tensor up over all processes; the trainer sets it."""

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_" and not callable(value)}

    @abstractmethod
    def initial_state(self, place: BatchPlace) -> RecurrentState | None:
        """Initial states for the rows of a micro-batch; None is the zero state."""

    def evaluation_state(self, place: BatchPlace) -> RecurrentState | None:
        """Initial states for the rows of an evaluation batch; by default None, the zero state."""
        return None

    def observe(self, place: BatchPlace, final_state: RecurrentState) -> None:  # noqa: B027
        """Called with the final states of the micro-batch at `place`, without gradients. By default keeps nothing."""

    def end_step(self) -> None:  # noqa: B027
        """Called after the optimizer step, when all of its micro-batches were observed."""

    def reset(self) -> None:  # noqa: B027
        """Return to the state before the first batch."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must keep, as named tensors. By default nothing."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""

    def logs(self) -> dict[str, float]:
        """Values for the training log, by name."""
        return {}
