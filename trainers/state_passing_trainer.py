"""Post-training with state passing."""

from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import PassedStates
from hf_recurrent_lengthgen.trainers.state_passing_config import StatePassingConfig


class StatePassingTrainer(InitialStateTrainer):
    """`Trainer` in which sequences start from the final state of another sequence (arXiv:2507.02782, section 4.4).

    A drop-in for `Trainer` and `TrainingArguments`:

        trainer = StatePassingTrainer(model, StatePassingConfig("out"), train_dataset=blocks)
    """

    config_class = StatePassingConfig
    method = "state_passing"
    needs_shuffled_data = True
    args: StatePassingConfig

    def initial_state_source(self) -> PassedStates:
        """The final states of the previous step."""
        return PassedStates(self.args.state_drop_probability, self.args.carry_conv_state)
