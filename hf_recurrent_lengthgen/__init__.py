"""Recurrent language models that keep working beyond their training length."""

from .models import StatefulMamba2Config, StatefulMamba2ForCausalLM, StatefulMamba2Model
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
    "LayerState",
    "RecurrentState",
    "StatefulMamba2Config",
    "StatefulMamba2ForCausalLM",
    "StatefulMamba2Model",
    "concatenate_rows",
    "detach_state",
    "keep_rows",
    "load_state",
    "save_state",
    "state_statistics",
    "take_rows",
]
