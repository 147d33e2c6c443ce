"""Trainers that choose the initial state of training sequences; imported as hf_recurrent_lengthgen.trainers."""

from hf_recurrent_lengthgen.trainers.alignment import AlignmentConfig, AlignmentTrainer
from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS, InitialStateTrainer
from hf_recurrent_lengthgen.trainers.combining import combine
from hf_recurrent_lengthgen.trainers.fitted_noise import FittedNoise, FittedNoiseConfig, FittedNoiseTrainer
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource
from hf_recurrent_lengthgen.trainers.learned_state import LearnedStateConfig, LearnedStateSource, LearnedStateTrainer
from hf_recurrent_lengthgen.trainers.metric_callbacks import Metric, MetricCallback
from hf_recurrent_lengthgen.trainers.mixed_states import MixedStates, MixedStatesConfig, MixedStatesTrainer
from hf_recurrent_lengthgen.trainers.random_noise import RandomNoise, RandomNoiseConfig, RandomNoiseTrainer
from hf_recurrent_lengthgen.trainers.ready_metrics import (
    context_harm,
    effective_remembrance_at,
    length_evaluation,
    misalignment,
    retrieval,
)
from hf_recurrent_lengthgen.trainers.state_passing import PassedStates, StatePassingConfig, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.statex import StateXConfig, StateXTrainer
from hf_recurrent_lengthgen.trainers.tbtt import TbttConfig, TbttTrainer
from hf_recurrent_lengthgen.trainers.zero_state import ZeroStates, ZeroStateTrainer

__all__ = [
    "INTERVENTIONS",
    "AlignmentConfig",
    "AlignmentTrainer",
    "BatchPlace",
    "FittedNoise",
    "FittedNoiseConfig",
    "FittedNoiseTrainer",
    "InitialStateConfig",
    "InitialStateSource",
    "InitialStateTrainer",
    "LearnedStateConfig",
    "LearnedStateSource",
    "LearnedStateTrainer",
    "Metric",
    "MetricCallback",
    "MixedStates",
    "MixedStatesConfig",
    "MixedStatesTrainer",
    "PassedStates",
    "RandomNoise",
    "RandomNoiseConfig",
    "RandomNoiseTrainer",
    "StatePassingConfig",
    "StatePassingTrainer",
    "StateXConfig",
    "StateXTrainer",
    "TbttConfig",
    "TbttTrainer",
    "ZeroStateTrainer",
    "ZeroStates",
    "combine",
    "context_harm",
    "effective_remembrance_at",
    "length_evaluation",
    "misalignment",
    "retrieval",
]
