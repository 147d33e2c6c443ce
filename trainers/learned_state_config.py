"""Settings of a learned initial state."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig


@dataclass
class LearnedStateConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of a learned initial state (state tuning).

    Raises:
        ValueError: for `load_best_model_at_end` without `train_model`, and as `InitialStateConfig`.
    """

    train_model: bool = field(
        default=False, metadata={"help": "Whether the weights of the model are trained, too. Default: only the state."}
    )
    learn_conv_state: bool = field(
        default=True,
        metadata={
            "help": "Whether the short-convolution part of the state is learned, too (else it stays zero). "
            "Default: true."
        },
    )

    def check(self) -> None:
        if self.load_best_model_at_end and not self.train_model:
            raise ValueError("load_best_model_at_end looks for weights, which are not trained: leave it out.")
        super().check()
