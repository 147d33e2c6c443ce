"""`Trainer` does not pass itself to its callbacks, so those that need their trainer are attached to it."""

from abc import ABC, abstractmethod
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)


class AttachedCallback(TrainerCallback, ABC):
    """A callback that needs its trainer. The trainers of this package attach it; a stock one does not."""

    @abstractmethod
    def attach(self, trainer: Trainer) -> Any:
        """Add this callback to its trainer, unless it is there already."""


def is_finished(state: TrainerState) -> bool:
    """Whether a run has all its steps."""
    return 0 < state.max_steps <= state.global_step


class RunCallback(TrainerCallback):
    """Tells a trainer when epochs begin and steps end, and ends a resumed run that is finished."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        record = self._trainer.run_record
        if not state.global_step:
            record.note_settings(self._trainer)
        if not state.is_world_process_zero:
            return
        if is_finished(state):
            logger.warning(f"Nothing is left to train: the run has completed all of its {state.max_steps} steps.")
        elif record.changes:
            changes = "; ".join(f"{name} {before} -> {now}" for name, (before, now) in record.changes.items())
            logger.warning(f"From step {state.global_step} on, these settings differ from before: {changes}.")

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.begin_epoch(int(state.epoch or 0))
        self._had_steps_left = not is_finished(state)
        if is_finished(state):  # Trainer itself would take one more step
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.end_epoch()
        if not self._had_steps_left:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.initial_states.end_step()
