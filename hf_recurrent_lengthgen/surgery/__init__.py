"""Changes to the weights of a model."""

from .mimetic import mimetic_initialization
from .state_expansion import ExpansionReport, expand_state, expansion_report

__all__ = ["ExpansionReport", "expand_state", "expansion_report", "mimetic_initialization"]
