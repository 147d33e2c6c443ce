"""The diagnosis of models in length: its parts, how they are taken, and the page that shows them."""

from typing import Any

from hf_recurrent_lengthgen.diagnosis.constant_prompt import CONSTANT_PROMPT
from hf_recurrent_lengthgen.diagnosis.misalignment import MISALIGNMENT
from hf_recurrent_lengthgen.diagnosis.part import Part
from hf_recurrent_lengthgen.diagnosis.remembrance import REMEMBRANCE
from hf_recurrent_lengthgen.diagnosis.states import STATES

PARTS: dict[str, Part[Any]] = {part.name: part for part in (STATES, REMEMBRANCE, MISALIGNMENT, CONSTANT_PROMPT)}
"""What a diagnosis has beside the evaluation: a new metric is listed here, and nowhere else."""
