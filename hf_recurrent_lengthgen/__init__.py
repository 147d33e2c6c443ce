"""Recurrent language models that keep working beyond their training length."""

from . import models
from .hybrids import stateful
from .loading import load_model
from .models import *  # noqa: F403  every family
from .models.forgetting import Forgetting, forgetting
from .models.recurrent_state import (
    LayerState,
    RecurrentState,
    concatenate_rows,
    detach_state,
    keep_rows,
    load_state,
    save_state,
    state_statistics,
    take_rows,
)

__all__ = [
    "Forgetting",
    "LayerState",
    "RecurrentState",
    "concatenate_rows",
    "detach_state",
    "forgetting",
    "keep_rows",
    "load_model",
    "load_state",
    "save_state",
    "state_statistics",
    "stateful",
    "take_rows",
]
__all__ += models.__all__
