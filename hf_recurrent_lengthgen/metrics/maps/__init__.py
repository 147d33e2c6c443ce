"""Attention maps of recurrent layers."""
