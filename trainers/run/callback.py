"""What a run does between the steps of `Trainer`: states begin and end, and a signal ends it with a checkpoint."""

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers.run import resume
from hf_recurrent_lengthgen.trainers.run.pushes import prepare_push

logger = logging.get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class AttachedCallback(TrainerCallback, ABC):
    """A callback that needs its trainer, which `Trainer` does not pass to it; trainers of this package attach it."""

    @abstractmethod
    def attach(self, trainer: Trainer) -> Any:
        """Add this callback to its trainer, unless it is there already."""


def is_finished(state: TrainerState) -> bool:
    """Whether a run has all its steps."""
    return 0 < state.max_steps <= state.global_step


class RunCallback(TrainerCallback):
    """Loads the initial states of a run, tells their source when steps end, and ends the run on a signal.

    Attributes:
        received: The signal that arrived in this process, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.received: int | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        args.logging_nan_inf_filter = False  # it reads each loss, for which it waits; one that is NaN ends the run
        resume.load_states(self._trainer)
        self._trainer.run_record.note_settings(self._trainer)
        if is_finished(state) and state.is_world_process_zero:
            logger.warning(f"Nothing is left to train: the run has completed all of its {state.max_steps} steps.")

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if hasattr(self._trainer.sampler, "set_epoch"):  # also when a run is resumed inside the epoch
            self._trainer.sampler.set_epoch(int(state.epoch or 0))
        self._had_steps_left = not is_finished(state)
        if is_finished(state):  # Trainer itself would take one more step
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._had_steps_left:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.initial_states.end_step()
        self.on_evaluate(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer.any_process(self.received is not None):
            control.should_save = control.should_training_stop = True
            # Otherwise the run could not be resumed, or Trainer would save the best checkpoint only, or keep no other.
            args.save_only_model, args.save_strategy, args.save_total_limit = False, SaveStrategy.STEPS, None

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        checkpoint = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        prepare_push(str(args.output_dir), args.hub_token, checkpoint if checkpoint.is_dir() else None)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the first SIGINT or SIGTERM, in the main thread only; a second one goes to the previous handler.

        Raises:
            KeyboardInterrupt: at the end, if a process got SIGINT.
            SystemExit: at the end, if this process got SIGTERM.
        """
        self.received = None
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        args = self._trainer.args
        before_signal = args.save_only_model, args.save_strategy, args.save_total_limit
        before = {number: signal.getsignal(number) for number in numbers}
        owner = os.getpid()

        def note(number: int, frame: Any) -> None:
            if os.getpid() != owner:  # a data worker that was forked from this process
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
                return
            self.received = number
            for each, handler in before.items():
                signal.signal(each, handler)
            print(
                "\nInterrupted: finishing this step and writing a checkpoint. Interrupt again to stop at once.",
                flush=True,
            )

        for number in numbers:
            signal.signal(number, note)
        try:
            yield
        except KeyboardInterrupt:
            self._print_interrupted()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            args.save_only_model, args.save_strategy, args.save_total_limit = before_signal
        if self._trainer.any_process(self.received is not None):
            self._print_interrupted()
            raise SystemExit(128 + signal.SIGTERM) if self.received == signal.SIGTERM else KeyboardInterrupt

    def _print_interrupted(self) -> None:
        if self._trainer.is_world_process_zero():
            hint = resume.hint(self._trainer.args.output_dir)
            print(f"\nInterrupted after step {self._trainer.state.global_step}. {hint}", flush=True)
