"""Trainers that choose the initial state of training sequences; imported as hf_recurrent_lengthgen.trainers."""

from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource, PassedStates, ZeroStates
from hf_recurrent_lengthgen.trainers.state_passing_config import StatePassingConfig
from hf_recurrent_lengthgen.trainers.state_passing_trainer import StatePassingTrainer
from hf_recurrent_lengthgen.trainers.zero_state_trainer import ZeroStateTrainer

__all__ = [
    "BatchPlace",
    "InitialStateSource",
    "InitialStateTrainer",
    "PassedStates",
    "StatePassingConfig",
    "StatePassingTrainer",
    "ZeroStateTrainer",
    "ZeroStates",
]
