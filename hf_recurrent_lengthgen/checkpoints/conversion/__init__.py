"""Checkpoints from and to the formats of mamba-ssm, Transformers, flash-linear-attention and RWKV's authors."""

from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint

__all__ = ["convert_checkpoint", "export_checkpoint"]
