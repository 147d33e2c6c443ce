"""Changes to the weights of a model."""

from .mimetic import mimetic_initialization

__all__ = ["mimetic_initialization"]
