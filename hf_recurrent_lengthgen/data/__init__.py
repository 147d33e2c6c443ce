"""Corpora, packing and batches."""
