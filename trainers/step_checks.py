"""What must hold before the weights change, asked of the device once per step.

Each number that is read from the device waits for all that it has to do. So a step puts its questions (are the ids
those of the vocabulary, are losses and states finite) and reads the answers together.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers.nonfinite_states import StateSizes
from hf_recurrent_lengthgen.trainers.step_logs import StepLogs

logger = logging.get_logger(__name__)


class StepChecks:
    """The questions about the micro-batches of a step.

    Args:
        hint: Says how to continue a run that stops now.
    """

    def __init__(self, hint: Callable[[], str]) -> None:
        self._hint = hint
        self._waiting: list[tuple[Tensor, Callable[[bool], None]]] = []

    def ask(self, question: Tensor, then: Callable[[bool], None]) -> None:
        """Call `then` with the answer, a tensor with one boolean, in `read`."""
        self._waiting.append((question, then))

    def read(self) -> None:
        """Answer the questions in the order in which they were asked, up to one whose answer raises."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        device = waiting[0][0].device
        answers: list[bool] = torch.stack([asked.to(device) for asked, _ in waiting]).tolist()
        for found, (_, then) in zip(answers, waiting, strict=True):
            then(found)

    def ask_initial_state(self, is_broken: Tensor, where: str, source: str) -> None:
        """Stop at initial states with NaN or infinite values."""

        def then(found: bool) -> None:
            if found:
                raise ValueError(
                    f"The initial_state of {where} has NaN or infinite values: {source} must give finite ones. "
                    f"{self._hint()}"
                )

        self.ask(is_broken, then)

    def ask_loss(self, loss: Tensor, where: str) -> None:
        """Stop at a loss that is not finite."""
        loss = loss.detach()

        def then(found: bool) -> None:
            if found:
                raise ValueError(
                    f"The loss of {where} is {loss.item()}. {self._hint()} Lower the learning rate, clip gradients "
                    "(max_grad_norm), and look for batches without labels."
                )

        self.ask(~loss.isfinite(), then)

    def ask_final_state(self, sizes: StateSizes, broken: Tensor, where: str, resets: bool, logs: StepLogs) -> None:
        """Log the sizes of final states; stop at broken ones, or tell that they are reset."""

        def then(found: bool) -> None:
            if found:
                told = f"final_state of {where}: {sizes.describe_broken()}."
                if not resets:
                    raise ValueError(
                        f"{told} {self._hint()} To go on from zero in these rows, set nonfinite_states='reset'."
                    )
                logger.warning(f"{told} The states of these rows are reset to zero.")
            logs.add(**sizes.logs(broken if found else None))

        self.ask(broken.any(), then)
