"""Plain training with this package's checkpoints and checks."""

from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import ZeroStates


class ZeroStateTrainer(InitialStateTrainer):
    """`Trainer` from the zero state, with the resume and the checks of `InitialStateTrainer`."""

    def initial_state_source(self) -> ZeroStates:
        """Always zero."""
        return ZeroStates()
