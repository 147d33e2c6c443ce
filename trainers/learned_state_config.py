"""Settings of a learned initial state."""

from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig


@dataclass
class LearnedStateConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of a learned initial state (state tuning).

    Raises:
        ValueError: for `load_best_model_at_end` without `train_model`, and as in `InitialStateConfig`.
    """

    train_model: bool = field(
        default=False, metadata={"help": "Whether to train the weights of the model, too. Default: only the state."}
    )
    learn_conv_state: bool = field(
        default=True,
        metadata={
            "help": "Whether to learn the short-convolution part of the state, too; otherwise it stays zero. "
            "Default: true."
        },
    )

    adapter_name: str = field(
        default="default",
        metadata={
            "help": "Name of the state in model.learned_states; one that is there is trained further. "
            "Default: default."
        },
    )

    def check(self) -> None:
        if self.load_best_model_at_end and not self.train_model:
            raise ValueError(
                "load_best_model_at_end needs checkpoints with weights, but only the state is trained: leave it out, "
                "or set train_model=True."
            )
        super().check()
