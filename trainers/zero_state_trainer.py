"""Plain training with this package's checkpoints and checks."""

from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import ZeroStates


class ZeroStateTrainer(InitialStateTrainer):
    """`Trainer` from the zero state, with the resume, the checks and the options of `InitialStateTrainer`."""

    needs_states = False

    def initial_state_source(self) -> ZeroStates:
        """Always zero."""
        return ZeroStates()
