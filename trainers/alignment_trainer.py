"""Training with the output alignment loss, from the zero state."""

from typing import Any

from hf_recurrent_lengthgen.trainers.alignment_config import AlignmentConfig
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import ZeroStates


class AlignmentTrainer(InitialStateTrainer):
    """`Trainer` with L_train + alpha L_misalign ("Output Alignment", Eq. 4), for recurrent models and Transformers.

    Rows hold T + l_extra tokens: PackedBlocks of 1.5 T is enough. The other trainers take `alignment_alpha`, too, so
    that the loss goes with every source of initial states.

        trainer = AlignmentTrainer(model, AlignmentConfig("out"), train_dataset=blocks)
    """

    config_class = AlignmentConfig
    needs_states = False
    args: AlignmentConfig

    @staticmethod
    def initial_state_source(args: AlignmentConfig, trainer: Any) -> ZeroStates:
        return ZeroStates()
