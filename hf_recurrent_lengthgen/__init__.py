"""Recurrent language models that keep working beyond their training length.

Model families are in `hf_recurrent_lengthgen.models`, which registers them with the Auto classes of Transformers.
Trainers are in `hf_recurrent_lengthgen.trainers`, metrics in `hf_recurrent_lengthgen.metrics`. The names here are
loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import versions as _versions

if TYPE_CHECKING:
    from .checkpoints.loading import load_model
    from .hybrids import stateful
    from .models.scan_forgetting import Forgetting, forgetting
    from .models.state_learned import LearnedStates
    from .models.state_on_disk import load_state, save_state
    from .models.state_value import (
        LayerState,
        RecurrentState,
        clone_state,
        concatenate_rows,
        detach_state,
        keep_rows,
        take_rows,
        zero_state,
    )

__version__ = _versions.version_of("hf_recurrent_lengthgen")
__all__ = [
    "Forgetting",
    "LayerState",
    "LearnedStates",
    "RecurrentState",
    "__version__",
    "clone_state",
    "concatenate_rows",
    "detach_state",
    "forgetting",
    "keep_rows",
    "load_model",
    "load_state",
    "save_state",
    "stateful",
    "take_rows",
    "zero_state",
]
_PACKAGES = ("checkpoints", "data", "metrics", "models", "state_files", "surgery", "trainers")
_NOT_OF_STATES = {
    "Forgetting": "models.scan_forgetting",
    "LearnedStates": "models.state_learned",
    "forgetting": "models.scan_forgetting",
    "load_model": "checkpoints.loading",
    "load_state": "models.state_on_disk",
    "save_state": "models.state_on_disk",
    "stateful": "hybrids",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), because importing Transformers' models takes seconds."""
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_NOT_OF_STATES.get(name, 'models.state_value')}", __name__)
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
