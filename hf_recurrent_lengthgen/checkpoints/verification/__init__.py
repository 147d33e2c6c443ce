"""Checks of a checkpoint without this package."""

from hf_recurrent_lengthgen.checkpoints.verification.verify import verify_checkpoint

__all__ = ["verify_checkpoint"]
