"""Training with the output alignment loss, from the zero state."""

from typing import Any

from hf_recurrent_lengthgen.trainers.alignment_config import AlignmentConfig
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import ZeroStates


class AlignmentTrainer(InitialStateTrainer):
    """`Trainer` with L_train + alpha L_misalign (Du et al., 2025, Eq. 4), for recurrent models and Transformers.

    Rows must hold T + l_extra tokens; `PackedBlocks` of 1.5 T tokens are enough. The other trainers also take
    `alignment_alpha`, so the loss can be combined with every source of initial states.

        trainer = AlignmentTrainer(model, AlignmentConfig("out"), train_dataset=blocks)
    """

    config_class = AlignmentConfig
    needs_states = False
    args: AlignmentConfig

    @staticmethod
    def initial_state_source(args: AlignmentConfig, trainer: Any) -> ZeroStates:
        return ZeroStates()
