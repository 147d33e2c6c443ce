"""Changes to the weights of a model, and calibrated scales of its layers."""

from .calibration import Calibration, calibrate
from .mimetic import mimetic_initialization
from .state_expansion import ExpansionReport, expand_state, expansion_report
from .teacher_layers import initialize_from_teacher_layer

__all__ = [
    "Calibration",
    "ExpansionReport",
    "calibrate",
    "expand_state",
    "expansion_report",
    "initialize_from_teacher_layer",
    "mimetic_initialization",
]
