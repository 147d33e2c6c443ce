"""Post-training with state passing."""

from typing import Any

from hf_recurrent_lengthgen.methods import Method
from hf_recurrent_lengthgen.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import PassedStates
from hf_recurrent_lengthgen.trainers.state_passing_config import StatePassingConfig


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
