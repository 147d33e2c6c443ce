"""Truncated backpropagation through time (Buitrago Ruiz and Gu, 2025, section 4.5; Chen et al., 2024, appendix F).

    h_{-1} of row i in step n  =  h_T of row i in step n - 1, without gradient

Sequences continue one another, so row i of the previous step is the text before; the source is that of state passing.
Examples with labels are instead read whole in one step, in windows (`windows.py`), each from zero.
"""

from dataclasses import dataclass
from typing import Any

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import InitialStateSource
from hf_recurrent_lengthgen.trainers.state_passing import CarriedStateConfig, PassedStates
from hf_recurrent_lengthgen.trainers.zero_state import ZeroStates


@dataclass
class TbttConfig(CarriedStateConfig):
    """`TrainingArguments` and the settings of TBTT (Buitrago Ruiz and Gu, 2025, section 4.5).

    The layout of texts and the number of chunks before a reset are settings of the data
    (`hf_recurrent_lengthgen.data.ContinuedChunks`). For other data, `bptt_chunk_length` is the length of the chunks in
    which each sequence is read, and `bptt_window` is 1 by default.
    """


class TbttTrainer(InitialStateTrainer):
    """`Trainer` with truncated backpropagation through time.

    Row i of a step continues row i of the previous step; gradients stop between them (Buitrago Ruiz and Gu, 2025,
    section 4.5; Chen et al., 2024, appendix F):

        chunks = ContinuedChunks(stream, length=2048)
        trainer = TbttTrainer(model, TbttConfig("out"), train_dataset=chunks)

    Or each sequence is an example with labels, however long, and is read in chunks of 2,048 tokens:

        trainer = TbttTrainer(model, TbttConfig("out", bptt_chunk_length=2048), train_dataset=chats)
    """

    config_class = TbttConfig
    about = Method(
        "tbtt",
        "truncated backpropagation through time",
        "Long texts are trained on in chunks, and each chunk starts from the final state of the one before",
        "tbtt",
        UNEXPLORED_STATES,
    )
    needs_continued_data = True
    args: TbttConfig

    @staticmethod
    def initial_state_source(args: TbttConfig, trainer: Any) -> InitialStateSource:
        if trainer.continues:
            return PassedStates(args.state_drop_probability, args.carry_conv_state)
        return ZeroStates()
