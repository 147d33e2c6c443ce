"""Settings of truncated backpropagation through time."""

from dataclasses import dataclass

from hf_recurrent_lengthgen.trainers.initial_state_config import CarriedStateConfig


@dataclass
class TbttConfig(CarriedStateConfig):
    """`TrainingArguments` and the settings of TBTT (Buitrago Ruiz and Gu, 2025, section 4.5).

    The layout of texts in rows and the number of chunks before a reset are settings of the data
    (`hf_recurrent_lengthgen.data.ContinuedChunks`).
    """
