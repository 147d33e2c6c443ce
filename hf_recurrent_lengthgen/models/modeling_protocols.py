"""What functions need of a model with states: one of this package, of a checkpoint's code, or `stateful(model)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from transformers.cache_utils import Cache

from .state_value import LayerShape, RecurrentState


class StatefulModel(Protocol):
    """A model that is called with `initial_state` and `output_final_state`, and whose output has `final_state`."""

    config: Any
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the state of every layer, without the batch dimension."""

    def zero_state(self, batch_size: int) -> RecurrentState:
        """The zero state, on the device of the model."""

    def first_state(self, batch_size: int) -> RecurrentState:
        """The state before any token: the active learned state, or zero."""

    def __getattr__(self, name: str) -> Any:
        """What all models of Transformers have."""


class HybridModel(StatefulModel, Protocol):
    """A model that may have attention layers beside its states."""

    _layout: Any

    @property
    def attends(self) -> bool:
        """Whether there are attention layers, whose keys and values no state carries."""

    def new_attention_cache(self) -> Cache | None:
        """An empty cache for the keys and values of one text; None for a model without attention layers."""


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


def base_of(model: Any) -> Any:
    """The model itself, without PEFT around it; others as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
