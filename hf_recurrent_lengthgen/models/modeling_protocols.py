"""How functions handle a model with states: one of this package, of a checkpoint's code, or `stateful(model)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put all modules into evaluation mode, and afterwards back those that were in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def base_of(model: Any) -> Any:
    """The model itself, without PEFT around it; others as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
