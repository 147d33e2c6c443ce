"""Accuracy on tasks of symbols, by the length of their strings."""
