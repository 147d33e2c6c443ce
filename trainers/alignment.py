"""Output alignment, L_train + alpha L_misalign (Du et al., 2025, Eq. 4), from the zero state.

The loss is in `alignment_loss.py`, because every other trainer takes `alignment_alpha`, too.
"""

from dataclasses import dataclass

from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.zero_state import ZeroStateTrainer


@dataclass
class AlignmentConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of output alignment, which is on by default."""

    alignment_alpha: float = option(
        0.1,
        "Weight alpha of the output alignment loss (Du et al., 2025, Eq. 4). In the paper, 0.1 to 0.3 "
        "helps; 0.5 or more hurts. Default 0.1.",
    )


class AlignmentTrainer(ZeroStateTrainer):
    """`Trainer` with L_train + alpha L_misalign (Du et al., 2025, Eq. 4), for recurrent models and Transformers.

    Sequences must hold T + l_extra tokens; `PackedBlocks` of 1.5 T tokens are enough. The other trainers also take
    `alignment_alpha`, so the loss can be combined with every source of initial states.

        trainer = AlignmentTrainer(model, AlignmentConfig("out"), train_dataset=blocks)
    """

    config_class = AlignmentConfig
    args: AlignmentConfig
