"""Recurrent language models that keep working beyond their training length.

Model families are in `hf_recurrent_lengthgen.models`, which registers them with the Auto classes of Transformers.
Trainers are in `hf_recurrent_lengthgen.trainers`, metrics in `hf_recurrent_lengthgen.metrics`. The names here are
loaded on first use (PEP 562), so that the command line answers before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import versions as _versions

if TYPE_CHECKING:
    from .checkpoints.loading import load_model as load_model
    from .hybrids import stateful as stateful
    from .models.scan_forgetting import Forgetting as Forgetting
    from .models.scan_forgetting import forgetting as forgetting
    from .models.state_learned import LearnedStates as LearnedStates
    from .models.state_on_disk import load_state as load_state
    from .models.state_on_disk import save_state as save_state
    from .models.state_value import LayerState as LayerState
    from .models.state_value import RecurrentState as RecurrentState
    from .models.state_value import clone_state as clone_state
    from .models.state_value import concatenate_rows as concatenate_rows
    from .models.state_value import detach_state as detach_state
    from .models.state_value import keep_rows as keep_rows
    from .models.state_value import take_rows as take_rows
    from .models.state_value import zero_state as zero_state

_HOMES = {
    "Forgetting": "models.scan_forgetting",
    "LayerState": "models.state_value",
    "LearnedStates": "models.state_learned",
    "RecurrentState": "models.state_value",
    "clone_state": "models.state_value",
    "concatenate_rows": "models.state_value",
    "detach_state": "models.state_value",
    "forgetting": "models.scan_forgetting",
    "keep_rows": "models.state_value",
    "load_model": "checkpoints.loading",
    "load_state": "models.state_on_disk",
    "save_state": "models.state_on_disk",
    "stateful": "hybrids",
    "take_rows": "models.state_value",
    "zero_state": "models.state_value",
}
_PACKAGES = ("checkpoints", "data", "metrics", "models", "state_files", "surgery", "trainers")
__version__ = _versions.version_of("hf_recurrent_lengthgen")
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """A public name, or one of the packages here."""
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
