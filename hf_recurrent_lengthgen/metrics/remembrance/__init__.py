"""Effective Remembrance: how much distant tokens change predictions."""
