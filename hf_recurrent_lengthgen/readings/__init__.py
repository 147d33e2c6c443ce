"""Readings: what a model keeps of a text, as a value and as files that others can use."""

from hf_recurrent_lengthgen.readings.folders import (
    crop_reading,
    load_reading,
    positions_in,
    read_into,
    save_reading,
)
from hf_recurrent_lengthgen.readings.origin import Origin
from hf_recurrent_lengthgen.readings.reading import (
    LayerKeys,
    Reading,
    ask,
    branch,
    read_text,
    start_of,
    without_attention,
)

__all__ = [
    "LayerKeys",
    "Origin",
    "Reading",
    "ask",
    "branch",
    "crop_reading",
    "load_reading",
    "positions_in",
    "read_into",
    "read_text",
    "save_reading",
    "start_of",
    "without_attention",
]
