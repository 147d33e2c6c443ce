"""Checks of a checkpoint: without this package, in pieces, and against its source."""

from hf_recurrent_lengthgen.verification.verify import verify_checkpoint

__all__ = ["verify_checkpoint"]
