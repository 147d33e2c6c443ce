"""Plain training with this package's checkpoints and checks."""

from typing import Any

from hf_recurrent_lengthgen.methods import PLAIN
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import ZeroStates


class ZeroStateTrainer(InitialStateTrainer):
    """`Trainer` from the zero state, with the resume, the checks and the options of `InitialStateTrainer`."""

    about = PLAIN
    needs_states = False

    @staticmethod
    def initial_state_source(args: Any, trainer: Any) -> ZeroStates:
        return ZeroStates()
