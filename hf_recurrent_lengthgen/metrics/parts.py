"""The metrics of a diagnosis."""

from typing import Any

from hf_recurrent_lengthgen.metrics.misalignment import MISALIGNMENT
from hf_recurrent_lengthgen.metrics.part import Part
from hf_recurrent_lengthgen.metrics.remembrance.summary import REMEMBRANCE
from hf_recurrent_lengthgen.metrics.repeated_token import CONSTANT_PROMPT
from hf_recurrent_lengthgen.metrics.states.summary import STATES

PARTS: dict[str, Part[Any]] = {part.name: part for part in (STATES, REMEMBRANCE, MISALIGNMENT, CONSTANT_PROMPT)}
"""The parts of a diagnosis in addition to the evaluation, by name."""


def register_metric(part: Part[Any]) -> None:
    """Add a metric to `lengthgen diagnose`, its page and model cards; a `ValueError` if its name is taken."""
    if PARTS.setdefault(part.name, part).compute.__module__ != part.compute.__module__:
        raise ValueError(f"There is a metric {part.name!r} already: give another name.")
    PARTS[part.name] = part  # a cell of a notebook may run again
