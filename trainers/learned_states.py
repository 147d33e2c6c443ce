"""Starting every sequence from a trainable state ("state tuning" in the RWKV community)."""

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.learned_states import LearnedState
from hf_recurrent_lengthgen.models.recurrent_state import RecurrentState, map_state
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource


class LearnedStateSource(InitialStateSource):
    """Every sequence starts from the same learned state, also in evaluation.

    Args:
        learned: The parameters.
    """

    def __init__(self, learned: LearnedState) -> None:
        self._learned = learned

    def initial_state(self, place: BatchPlace) -> RecurrentState:
        """The learned state for every row; gradients flow into it."""
        return map_state(lambda part: part.expand(place.rows, *part.shape[1:]), self._learned())

    def evaluation_state(self, place: BatchPlace) -> RecurrentState:
        """The learned state for every row."""
        return self.initial_state(place)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._learned.state_dict().items()}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        self._learned.load_state_dict(tensors)
