"""Checkpoints from and to the formats of mamba-ssm, Transformers, flash-linear-attention and RWKV's authors."""
