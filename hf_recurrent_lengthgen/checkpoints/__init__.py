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
    from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
    from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
    from hf_recurrent_lengthgen.checkpoints.hub.push import do_push, plan_push
    from hf_recurrent_lengthgen.checkpoints.loading import load_model
    from hf_recurrent_lengthgen.checkpoints.records import read_lineage, read_verification
    from hf_recurrent_lengthgen.checkpoints.verification.verify import verify_checkpoint

__all__ = [
    "convert_checkpoint",
    "do_push",
    "export_checkpoint",
    "load_model",
    "plan_push",
    "read_lineage",
    "read_verification",
    "verify_checkpoint",
]
_PLACES = {
    "convert_checkpoint": "conversion.convert",
    "do_push": "hub.push",
    "export_checkpoint": "conversion.export",
    "load_model": "loading",
    "plan_push": "hub.push",
    "read_lineage": "records",
    "read_verification": "records",
    "verify_checkpoint": "verification.verify",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562): training needs records, but no cards and no client of the Hub."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
