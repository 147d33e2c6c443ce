"""State passing: sequences start from final states of others (Buitrago Ruiz and Gu, 2025, arXiv:2507.02782, 4.4).

    h_{-1} of row i in step n  =  0 with probability p, else h_T of row i in step n - 1, without gradient

The data are shuffled, so row i of the previous step is another text.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.models.state_value import (
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
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource


class PassedStates(InitialStateSource):
    """The final state of the same row in the previous step.

    With shuffled data, this is the state of a different sequence: state passing (section 4.4). With sequences that
    continue one another, it is truncated backpropagation through time (section 4.5).

    Each micro-batch of gradient accumulation carries its own states, so that all states of a step come from the
    previous step. A smaller batch uses and replaces the states of its first rows; the other rows keep their states.

    Args:
        drop_probability: Probability that a sequence starts from zero, drawn independently for each sequence (0.1 in
            the paper), so that the model stays good without context.
        carry_conv_state: Whether the states of the short convolutions are carried, too.
    """

    def __init__(self, drop_probability: float = 0.1, carry_conv_state: bool = True) -> None:
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

    def observe(self, place: BatchPlace, final_state: RecurrentState) -> None:
        state = map_state(_in_own_memory, detach_state(final_state))
        if not self.carry_conv_state:
            state = zero_conv(state)
        carried = self._carried.get(place.micro_batch)
        if carried is not None and state_batch_size(carried) > place.rows:
            state = concatenate_rows([state, take_rows(carried, slice(place.rows, None))])
        self._carried[place.micro_batch] = state

    def reset(self) -> None:
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
        places = {(int(key.split(".")[1]), int(key.split(".")[3])) for key in tensors}
        self._carried = {}
        for micro_batch, index in sorted(places):
            layer = f"micro_batches.{micro_batch}.layers.{index}"
            parts = (tensors[f"{layer}.{name}"].to(device) for name in LayerState._fields)
            self._carried[micro_batch] = (*self._carried.get(micro_batch, ()), LayerState(*parts))


def _in_own_memory(part: Tensor) -> Tensor:
    """The part in its own memory, as a checkpoint gives it back; a copy if it would keep more alive, as a slice of all
    inputs of a layer does, or lies in another order, in which sums are rounded otherwise."""
    owns = part.untyped_storage().nbytes() == part.nbytes and part.is_contiguous()
    return part if owns else part.clone(memory_format=torch.contiguous_format)


def _resize_rows(state: RecurrentState, rows: int) -> RecurrentState:
    """The first `rows` rows of a state, padded with zero rows."""
    missing = rows - state_batch_size(state)
    if missing <= 0:
        return take_rows(state, slice(rows))
    return concatenate_rows([state, map_state(lambda part: part.new_zeros(missing, *part.shape[1:]), state)])


@dataclass
class CarriedStateConfig(InitialStateConfig):
    """What state passing and TBTT share.

    Raises:
        ValueError: if `state_drop_probability` is not between 0 and 1, and as in `InitialStateConfig`.
    """

    state_drop_probability: float = option(
        0.0,
        "Probability that a training sequence starts from the zero state instead of a carried one, drawn "
        "independently for each sequence. Default 0.",
    )
    carry_conv_state: bool = option(
        True,
        "Whether to carry the short-convolution part of the state, too; otherwise it starts from zero. Default: true.",
    )


@dataclass
class StatePassingConfig(CarriedStateConfig):
    """`TrainingArguments` and the settings of state passing (Buitrago Ruiz and Gu, 2025, section 4.4)."""

    state_drop_probability: float = option(
        0.1,
        "Probability that a training sequence starts from the zero state instead of a passed one, drawn "
        "independently for each sequence. Default 0.1 for state passing, as in the paper (section 4.4), else 0.",
    )
    assume_shuffled: bool = option(
        False,
        "Declare that the training data are shuffled, for streams and samplers that cannot be checked: "
        "passed states must come from other sequences. Default: false.",
    )


class StatePassingTrainer(InitialStateTrainer):
    """`Trainer` in which sequences start from final states of others (Buitrago Ruiz and Gu, 2025, section 4.4).

    A drop-in replacement for `Trainer` and `TrainingArguments`:

        trainer = StatePassingTrainer(model, StatePassingConfig("out"), train_dataset=blocks)
    """

    config_class = StatePassingConfig
    about = Method(
        "state_passing",
        "state passing",
        "In state passing, training texts start from the final states of other texts instead of from nothing, so that "
        "the model also learns from the states that long texts lead to",
        "state-passing",
        UNEXPLORED_STATES,
    )
    needs_shuffled_data = True
    args: StatePassingConfig

    @staticmethod
    def initial_state_source(args: StatePassingConfig, trainer: Any) -> PassedStates:
        return PassedStates(args.state_drop_probability, args.carry_conv_state)
