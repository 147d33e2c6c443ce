"""Models in evaluation mode, for the time of a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .stateful_model import StatefulModel


@contextmanager
def evaluation_mode(model: nn.Module | StatefulModel) -> Iterator[None]:
    """Put all modules into evaluation mode, and afterwards back those that were in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
