"""Settings of truncated backpropagation through time."""

from dataclasses import dataclass

from hf_recurrent_lengthgen.trainers.initial_state_config import CarriedStateConfig


@dataclass
class TbttConfig(CarriedStateConfig):
    """`TrainingArguments` and the settings of TBTT (arXiv:2507.02782, section 4.5).

    How texts are laid out in rows, and after how many chunks states are reset, are settings of the data
    (`hf_recurrent_lengthgen.data.ContinuedChunks`).
    """
