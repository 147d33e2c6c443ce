"""Where the initial state of a training sequence comes from: small value classes, without a Trainer.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 4: every intervention only chooses h_{-1} during training. A
source gives the initial states of a batch before the forward pass and sees the final states after it.

Random choices are keyed by (seed, step, micro-batch, global row), independent of the distribution of rows over
processes: two processes with two rows each make the choices of one process with four.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.recurrent_state import (
    LayerState,
    RecurrentState,
    concatenate_rows,
    detach_state,
    keep_rows,
    map_state,
    state_batch_size,
    take_rows,
    zero_conv,
)


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
            processes that share rows.
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


class InitialStateSource(ABC):
    """Gives the initial states of training batches and sees their final states.

    Its public attributes are its settings: numbers and strings that a resumed run must share.
    """

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

    def observe(  # noqa: B027
        self, place: BatchPlace, final_state: RecurrentState, broken: Tensor | None = None
    ) -> None:
        """Called with the final states of the micro-batch at `place`, without gradients. By default keeps nothing.

        Args:
            place: The micro-batch.
            final_state: Its final states; those of broken rows are zero.
            broken: Rows whose states were not finite or exploded, (rows,) bool; None if such rows stop the run.
        """

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


class ZeroStates(InitialStateSource):
    """Every sequence starts from zero: plain training."""

    def initial_state(self, place: BatchPlace) -> None:
        """None, the zero state."""


class PassedStates(InitialStateSource):
    """The final state of the same row in the previous step.

    With shuffled rows, this is the state of a different sequence: state passing (section 4.4). With rows that continue
    one another, it is truncated backpropagation through time (section 4.5).

    Each micro-batch of gradient accumulation carries its own states, so that all states of a step come from the
    previous step. A smaller batch uses and replaces the states of its first rows; the other rows keep theirs.

    Args:
        drop_probability: Probability that a sequence starts from zero, drawn independently for each sequence (0.1 in
            the paper), so that the model stays good without context.
        carry_conv_state: Whether the states of the short convolutions are carried, too.
    """

    def __init__(self, drop_probability: float = 0.1, carry_conv_state: bool = True) -> None:
        if not 0.0 <= drop_probability <= 1.0:
            raise ValueError(f"drop_probability must be between 0 and 1, got {drop_probability}.")
        self.drop_probability = drop_probability
        self.carry_conv_state = carry_conv_state
        self._carried: dict[int, RecurrentState] = {}

    def initial_state(self, place: BatchPlace) -> RecurrentState | None:
        """The carried states, with some rows dropped to zero; None if the micro-batch has none yet."""
        carried = self._carried.get(place.micro_batch)
        if carried is None:
            return None
        keep = place.uniform("drop") >= self.drop_probability
        if place.continues is not None:
            keep = keep.to(place.continues.device) & place.continues
        return keep_rows(_resize_rows(carried, place.rows), keep)

    def observe(self, place: BatchPlace, final_state: RecurrentState, broken: Tensor | None = None) -> None:
        state = map_state(_in_own_memory, detach_state(final_state))
        if not self.carry_conv_state:
            state = zero_conv(state)
        carried = self._carried.get(place.micro_batch)
        if carried is not None and state_batch_size(carried) > place.rows:
            state = concatenate_rows([state, take_rows(carried, slice(place.rows, None))])
        self._carried[place.micro_batch] = state

    def reset(self) -> None:
        """Forget all carried states."""
        self._carried = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Carried states as `micro_batches.{micro_batch}.layers.{layer}.{part}`."""
        return {
            f"micro_batches.{micro_batch}.layers.{index}.{part_name}": part.cpu().contiguous()
            for micro_batch, state in self._carried.items()
            for index, layer in enumerate(state)
            for part_name, part in zip(LayerState._fields, layer, strict=True)
        }

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: if a part is missing or unknown.
        """
        names = LayerState._fields
        layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        for key, value in tensors.items():
            found = re.fullmatch(rf"micro_batches\.(\d+)\.layers\.(\d+)\.({'|'.join(names)})", key)
            if found is None:
                raise ValueError(f"These tensors are not carried states: {sorted(tensors)[:4]}.")
            layers.setdefault((int(found[1]), int(found[2])), {})[found[3]] = value.to(device)
        carried: dict[int, RecurrentState] = {}
        for (micro_batch, index), parts in sorted(layers.items()):
            before = carried.get(micro_batch, ())
            place = f"micro_batches.{micro_batch}.layers.{len(before)}"
            missing = names if index > len(before) else [name for name in names if name not in parts]
            if missing:
                raise ValueError(f"The carried states lack {[f'{place}.{name}' for name in missing]}.")
            carried[micro_batch] = (*before, LayerState(**parts))
        self._carried = carried


def _in_own_memory(part: Tensor) -> Tensor:
    """The part; a copy if it would keep more memory alive than its own, as a slice of all inputs of a layer does."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def _resize_rows(state: RecurrentState, rows: int) -> RecurrentState:
    """The first `rows` rows of a state, padded with zero rows."""
    missing = rows - state_batch_size(state)
    if missing <= 0:
        return take_rows(state, slice(rows))
    return concatenate_rows([state, map_state(lambda part: part.new_zeros(missing, *part.shape[1:]), state)])
