"""What happens between the steps of a training: counts, checks, and where a finished run ends."""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers.resumed_optimizers import remember_settings

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer

logger = logging.get_logger(__name__)


def first_with(cls: type[Any], name: str) -> str:
    """The method that an object of a class has by a name, as "Class.name"."""
    return next(f"{base.__name__}.{name}" for base in cls.__mro__ if name in vars(base))


def is_finished(state: TrainerState) -> bool:
    """Whether a run has all its steps."""
    return 0 < state.max_steps <= state.global_step


class StepCallback(TrainerCallback):
    """Counts the micro-batches of an optimizer step, and tells when epochs begin and steps end.

    Attributes:
        micro-batch: The micro-batch of the step.
        observed: Micro-batches of the step whose loss was the method's.
    """

    def __init__(self, trainer: "InitialStateTrainer") -> None:
        self.micro_batch = self.observed = 0
        self._trainer = trainer
        self._has_steps = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        remember_settings(self._trainer.optimizer, new_run=not state.global_step)
        changes = self._trainer.run_record.changes(self._trainer)
        if is_finished(state):
            if state.is_world_process_zero:
                logger.warning(f"Nothing is left to train: the run has all its {state.max_steps} steps.")
        elif changes and state.is_world_process_zero:
            told = "; ".join(f"{name} {before} -> {now}" for name, (before, now) in changes.items())
            logger.warning(f"From step {state.global_step} on, other settings apply than before: {told}.")

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.begin_epoch(int(state.epoch or 0))
        if is_finished(state):  # Trainer itself would take one more step
            control.should_training_stop = True
        self._has_steps = not is_finished(state)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._has_steps:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.micro_batch = self.observed = 0

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.micro_batch += 1

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.observed <= self.micro_batch:
            raise ValueError(
                f"{self._trainer.describe_method()} took no part in step {state.global_step}: the training loss came "
                f"from {first_with(type(self._trainer), 'compute_loss')}, which does not call the compute_loss of "
                "InitialStateTrainer. Call super().compute_loss(...) in it; where it is of another trainer, let "
                "hf_recurrent_lengthgen.trainers.combine(method, trainer) join the two."
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.initial_states.end_step()
