"""The diagnosis of models on long texts: its parts, how they are measured, and the page that shows them."""

from typing import Any

from hf_recurrent_lengthgen.diagnosis.constant_prompt import CONSTANT_PROMPT
from hf_recurrent_lengthgen.diagnosis.misalignment import MISALIGNMENT
from hf_recurrent_lengthgen.diagnosis.part import Part
from hf_recurrent_lengthgen.diagnosis.remembrance import REMEMBRANCE
from hf_recurrent_lengthgen.diagnosis.states import STATES

PARTS: dict[str, Part[Any]] = {part.name: part for part in (STATES, REMEMBRANCE, MISALIGNMENT, CONSTANT_PROMPT)}
"""The parts of a diagnosis in addition to the evaluation. A new metric is registered only here."""
