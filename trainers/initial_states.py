"""Where the initial state of a training sequence comes from: small value classes, no Trainer in sight.

"Understanding and Improving Length Generalization in Recurrent Models" (arXiv:2507.02782), section 4: every
intervention only chooses h_{-1} during training. A source is asked for the states of a batch before the forward
pass and shown the final states after it.

Random choices are keyed by (seed, step, micro-batch, global row), never by how rows are spread over processes: two
processes with two rows each make the choices of one process with four.
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
    clone_state,
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
    """Where a micro-batch stands in the run.

    Attributes:
        seed: Seed of the run.
        step: Optimizer step, from 0.
        micro_batch: Micro-batch within the step under gradient accumulation, from 0.
        first_row: Global number of the first row: process index times rows per process.
        rows: Rows in this micro-batch.
        continues: Rows that go on with the text of the step before, (rows,) bool; None for all of them. The states of
            the others are not carried.
    """

    seed: int
    step: int
    micro_batch: int
    first_row: int
    rows: int
    continues: Tensor | None = field(default=None, compare=False)

    def row_generator(self, row: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator for one row (0 to rows - 1) and purpose, the same on every process layout."""
        return keyed_generator(self.seed, self.step, self.micro_batch, self.first_row + row, purpose, device=device)

    def uniform(self, purpose: str) -> Tensor:
        """One number in [0, 1) for each row, (rows,)."""
        return torch.stack([torch.rand((), generator=self.row_generator(row, purpose)) for row in range(self.rows)])


class InitialStateSource(ABC):
    """Gives the initial states of training batches and learns from their final states.

    Public attributes are its settings, plain numbers and words that a resumed run must share.
    """

    sum_over_processes: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)
    """Adds a tensor up over all processes; the trainer sets it."""

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_" and not callable(value)}

    @abstractmethod
    def initial_state(self, place: BatchPlace) -> RecurrentState | None:
        """Initial states for the rows of a micro-batch; None is the zero state."""

    def evaluation_state(self, place: BatchPlace) -> RecurrentState | None:
        """Initial states for the rows of a batch of an evaluation: the zero state, unless a source says otherwise."""
        return None

    def observe(  # noqa: B027
        self, place: BatchPlace, final_state: RecurrentState, broken: Tensor | None = None
    ) -> None:
        """See the final states of the micro-batch at `place`, without gradient history. By default nothing is kept.

        Args:
            place: The micro-batch.
            final_state: Its final states; those of broken rows are zero.
            broken: Rows whose states were not finite or exploded, (rows,) bool; None for none.
        """

    def end_step(self) -> None:  # noqa: B027
        """The optimizer step is over: what was observed in its micro-batches may be put together."""

    def reset(self) -> None:  # noqa: B027
        """Back to how it was before the first batch."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that must survive a checkpoint, as named tensors. By default nothing."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:  # noqa: B027
        """Take back what `state_dict` gave."""

    def logs(self) -> dict[str, float]:
        """What is worth a line in the training log."""
        return {}


class ZeroStates(InitialStateSource):
    """Every sequence starts from zero: plain training."""

    def initial_state(self, place: BatchPlace) -> None:
        """None, the zero state."""


class PassedStates(InitialStateSource):
    """The final state of the same row of the previous step.

    With shuffled rows that is state passing (section 4.4), the state of a different sequence; with rows that continue
    one another it is truncated backpropagation through time (section 4.5).

    Each micro-batch of gradient accumulation carries its own states, so that a step's states come from the
    step before. A smaller batch uses and replaces the states of its first rows; the other rows keep theirs.

    Args:
        drop_probability: Probability to start a sequence from zero, drawn for every sequence on its own (the paper
            uses 0.1), so that the model stays good without context.
        carry_conv_state: Whether the states of the short convolutions are passed too.
    """

    def __init__(self, drop_probability: float = 0.1, carry_conv_state: bool = True) -> None:
        if not 0.0 <= drop_probability <= 1.0:
            raise ValueError(f"drop_probability must be between 0 and 1, got {drop_probability}.")
        self.drop_probability = drop_probability
        self.carry_conv_state = carry_conv_state
        self._carried: dict[int, RecurrentState] = {}

    def initial_state(self, place: BatchPlace) -> RecurrentState | None:
        """The carried states, some rows dropped to zero; None before the micro-batch's first batch."""
        carried = self._carried.get(place.micro_batch)
        if carried is None:
            return None
        keep = place.uniform("drop") >= self.drop_probability
        if place.continues is not None:
            keep &= place.continues.cpu()
        return keep_rows(_resize_rows(carried, place.rows), keep)

    def observe(self, place: BatchPlace, final_state: RecurrentState, broken: Tensor | None = None) -> None:
        state = clone_state(detach_state(final_state))
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
        """Carried states as `micro-batches.{micro_batch}.layers.{layer}.{part}`."""
        return {
            f"micro_batches.{micro_batch}.layers.{index}.{part_name}": part.cpu().contiguous()
            for micro_batch, state in self._carried.items()
            for index, layer in enumerate(state)
            for part_name, part in zip(LayerState._fields, layer, strict=True)
        }

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: if a part is missing or unknown.
        """
        names = LayerState._fields
        layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        for key, value in tensors.items():
            found = re.fullmatch(rf"micro_batches\.(\d+)\.layers\.(\d+)\.({'|'.join(names)})", key)
            if found is None:
                raise ValueError(f"These are not carried states: {sorted(tensors)[:4]}.")
            layers.setdefault((int(found[1]), int(found[2])), {})[found[3]] = value.to(device)
        carried: dict[int, RecurrentState] = {}
        for (micro_batch, index), parts in sorted(layers.items()):
            before = carried.get(micro_batch, ())
            place = f"micro_batches.{micro_batch}.layers.{len(before)}"
            missing = names if index > len(before) else [name for name in names if name not in parts]
            if missing:
                raise ValueError(f"Carried states lack {[f'{place}.{name}' for name in missing]}.")
            carried[micro_batch] = (*before, LayerState(**parts))
        self._carried = carried


def _resize_rows(state: RecurrentState, rows: int) -> RecurrentState:
    """The first `rows` rows of a state, filled up with zero rows."""
    missing = rows - state_batch_size(state)
    if missing <= 0:
        return take_rows(state, slice(rows))
    return concatenate_rows([state, map_state(lambda part: part.new_zeros(missing, *part.shape[1:]), state)])
