"""Plain training: every sequence starts from zero, h_{-1} = 0. It is the control of all other methods."""

from typing import Any

from hf_recurrent_lengthgen.checkpoints.methods import PLAIN
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource


class ZeroStates(InitialStateSource):
    """Every sequence starts from zero: plain training."""

    always_zero = True

    def initial_state(self, place: BatchPlace) -> None:
        """None, the zero state."""


class ZeroStateTrainer(InitialStateTrainer):
    """`Trainer` from the zero state, with the resume, the checks and the options of `InitialStateTrainer`."""

    about = PLAIN
    needs_states = False

    @staticmethod
    def initial_state_source(args: Any, trainer: Any) -> ZeroStates:
        return ZeroStates()
