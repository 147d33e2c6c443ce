"""Trainers that choose the initial state of training sequences; imported as hf_recurrent_lengthgen.trainers."""

from hf_recurrent_lengthgen.trainers.alignment_config import AlignmentConfig
from hf_recurrent_lengthgen.trainers.alignment_trainer import AlignmentTrainer
from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS, InitialStateTrainer
from hf_recurrent_lengthgen.trainers.combining import combine
from hf_recurrent_lengthgen.trainers.fitted_noise_config import FittedNoiseConfig
from hf_recurrent_lengthgen.trainers.fitted_noise_trainer import FittedNoiseTrainer
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource, PassedStates, ZeroStates
from hf_recurrent_lengthgen.trainers.learned_state_config import LearnedStateConfig
from hf_recurrent_lengthgen.trainers.learned_state_trainer import LearnedStateTrainer
from hf_recurrent_lengthgen.trainers.learned_states import LearnedStateSource
from hf_recurrent_lengthgen.trainers.metric_callbacks import (
    Metric,
    MetricCallback,
    context_harm,
    effective_remembrance_at,
    misalignment,
    nll_by_length,
)
from hf_recurrent_lengthgen.trainers.mixed_states import MixedStates
from hf_recurrent_lengthgen.trainers.mixed_states_config import MixedStatesConfig
from hf_recurrent_lengthgen.trainers.mixed_states_trainer import MixedStatesTrainer
from hf_recurrent_lengthgen.trainers.noise_states import FittedNoise, RandomNoise
from hf_recurrent_lengthgen.trainers.random_noise_config import RandomNoiseConfig
from hf_recurrent_lengthgen.trainers.random_noise_trainer import RandomNoiseTrainer
from hf_recurrent_lengthgen.trainers.state_passing_config import StatePassingConfig
from hf_recurrent_lengthgen.trainers.state_passing_trainer import StatePassingTrainer
from hf_recurrent_lengthgen.trainers.statex_config import StateXConfig
from hf_recurrent_lengthgen.trainers.statex_trainer import StateXTrainer
from hf_recurrent_lengthgen.trainers.tbtt_config import TbttConfig
from hf_recurrent_lengthgen.trainers.tbtt_trainer import TbttTrainer
from hf_recurrent_lengthgen.trainers.zero_state_trainer import ZeroStateTrainer

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
    "misalignment",
    "nll_by_length",
]
