"""The life of a checkpoint: what it is and says of itself, from where it comes, where it goes.

- What it is: `loading` (models of all families), `adapters` (adapters of PEFT and learned states), `tensor_files`.
- What it says of itself: `records` (lineage and verification), `methods` and `papers`, `cards` and their `card_mark`.
- From where it comes: `sources` (folders, files, the Hub; the lineage that a new checkpoint continues), `conversion`.
- Where it goes: `verification`, `hub`, and `private_text`, which finds what must not leave a machine.

The names here are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion.convert import convert_checkpoint as convert_checkpoint
    from .conversion.export import export_checkpoint as export_checkpoint
    from .hub.push import do_push as do_push
    from .hub.push import plan_push as plan_push
    from .loading import load_model as load_model
    from .records import read_lineage as read_lineage
    from .records import read_verification as read_verification
    from .verification.verify import verify_checkpoint as verify_checkpoint

_HOMES = {
    "convert_checkpoint": "conversion.convert",
    "do_push": "hub.push",
    "export_checkpoint": "conversion.export",
    "load_model": "loading",
    "plan_push": "hub.push",
    "read_lineage": "records",
    "read_verification": "records",
    "verify_checkpoint": "verification.verify",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
