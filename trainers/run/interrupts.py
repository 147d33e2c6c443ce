"""`Trainer` dies inside a step when it is interrupted; here the step ends, and a checkpoint is written."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptCallback(TrainerCallback):
    """Ends training after the step in which a signal arrived, with a checkpoint.

    Args:
        any_process: Tells whether a condition holds in any process, so that all processes stop after the same step.

    Attributes:
        received: The signal that arrived in this process, or None.
    """

    def __init__(self, any_process: Callable[[bool], bool]) -> None:
        self._any_process = any_process
        self.received: int | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._any_process(self.received is not None):
            control.should_save = control.should_training_stop = True
            args.save_only_model = False  # otherwise the run could not be resumed

    on_evaluate = on_step_end

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the first SIGINT or SIGTERM; a second one goes to the previous handler. Only in the main thread."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
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

        for number in SIGNALS:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
