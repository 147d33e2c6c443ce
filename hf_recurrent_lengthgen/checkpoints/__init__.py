"""The life of a checkpoint: what it is and says of itself, from where it comes, where it goes.

- What it is: `loading` (models of all families), `adapters` (adapters of PEFT and learned states), `tensor_files`.
- What it says of itself: `records` (lineage and verification), `methods` and `papers`, `cards` and their `card_mark`.
- From where it comes: `sources` (folders, files, the Hub; the lineage that a new checkpoint continues), `conversion`.
- Where it goes: `verification`, `hub`, and `private_text`, which finds what must not leave a machine.

The names here are loaded on first use.
"""

from typing import TYPE_CHECKING

from hf_recurrent_lengthgen.first_use import on_first_use as _on_first_use

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint as convert_checkpoint
    from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint as export_checkpoint
    from hf_recurrent_lengthgen.checkpoints.hub.push import do_push as do_push
    from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push as plan_push
    from hf_recurrent_lengthgen.checkpoints.loading import load_model as load_model
    from hf_recurrent_lengthgen.checkpoints.records import read_lineage as read_lineage
    from hf_recurrent_lengthgen.checkpoints.records import read_verification as read_verification
    from hf_recurrent_lengthgen.checkpoints.verification.verify import verify_checkpoint as verify_checkpoint

__getattr__, __dir__, __all__ = _on_first_use(__name__, __file__)
