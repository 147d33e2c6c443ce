"""Trainers that choose the initial state of training sequences; imported as hf_recurrent_lengthgen.trainers.

The names are loaded on first use: a trainer loads its own file and what it needs.
"""

from typing import TYPE_CHECKING, Any

from hf_recurrent_lengthgen.first_use import on_first_use as _on_first_use

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.alignment import AlignmentConfig as AlignmentConfig
    from hf_recurrent_lengthgen.trainers.alignment import AlignmentTrainer as AlignmentTrainer
    from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS as INTERVENTIONS
    from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer as InitialStateTrainer
    from hf_recurrent_lengthgen.trainers.combining import combine as combine
    from hf_recurrent_lengthgen.trainers.fitted_noise import FittedNoise as FittedNoise
    from hf_recurrent_lengthgen.trainers.fitted_noise import FittedNoiseConfig as FittedNoiseConfig
    from hf_recurrent_lengthgen.trainers.fitted_noise import FittedNoiseTrainer as FittedNoiseTrainer
    from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig as InitialStateConfig
    from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace as BatchPlace
    from hf_recurrent_lengthgen.trainers.initial_states import InitialStateSource as InitialStateSource
    from hf_recurrent_lengthgen.trainers.learned_state import LearnedStateConfig as LearnedStateConfig
    from hf_recurrent_lengthgen.trainers.learned_state import LearnedStateSource as LearnedStateSource
    from hf_recurrent_lengthgen.trainers.learned_state import LearnedStateTrainer as LearnedStateTrainer
    from hf_recurrent_lengthgen.trainers.metric_callbacks import Metric as Metric
    from hf_recurrent_lengthgen.trainers.metric_callbacks import MetricCallback as MetricCallback
    from hf_recurrent_lengthgen.trainers.mixed_states import MixedStates as MixedStates
    from hf_recurrent_lengthgen.trainers.mixed_states import MixedStatesConfig as MixedStatesConfig
    from hf_recurrent_lengthgen.trainers.mixed_states import MixedStatesTrainer as MixedStatesTrainer
    from hf_recurrent_lengthgen.trainers.random_noise import RandomNoise as RandomNoise
    from hf_recurrent_lengthgen.trainers.random_noise import RandomNoiseConfig as RandomNoiseConfig
    from hf_recurrent_lengthgen.trainers.random_noise import RandomNoiseTrainer as RandomNoiseTrainer
    from hf_recurrent_lengthgen.trainers.ready_metrics import context_harm as context_harm
    from hf_recurrent_lengthgen.trainers.ready_metrics import effective_remembrance_at as effective_remembrance_at
    from hf_recurrent_lengthgen.trainers.ready_metrics import length_evaluation as length_evaluation
    from hf_recurrent_lengthgen.trainers.ready_metrics import misalignment as misalignment
    from hf_recurrent_lengthgen.trainers.ready_metrics import nll_by_length as nll_by_length
    from hf_recurrent_lengthgen.trainers.ready_metrics import retrieval as retrieval
    from hf_recurrent_lengthgen.trainers.state_passing import PassedStates as PassedStates
    from hf_recurrent_lengthgen.trainers.state_passing import StatePassingConfig as StatePassingConfig
    from hf_recurrent_lengthgen.trainers.state_passing import StatePassingTrainer as StatePassingTrainer
    from hf_recurrent_lengthgen.trainers.statex import StateXConfig as StateXConfig
    from hf_recurrent_lengthgen.trainers.statex import StateXTrainer as StateXTrainer
    from hf_recurrent_lengthgen.trainers.tbtt import TbttConfig as TbttConfig
    from hf_recurrent_lengthgen.trainers.tbtt import TbttTrainer as TbttTrainer
    from hf_recurrent_lengthgen.trainers.zero_state import ZeroStates as ZeroStates
    from hf_recurrent_lengthgen.trainers.zero_state import ZeroStateTrainer as ZeroStateTrainer

_load, __dir__, __all__ = _on_first_use(__name__, __file__)


def __getattr__(name: str) -> Any:
    """As in other packages; `INTERVENTIONS` holds all methods, so it imports all of them."""
    if name == "INTERVENTIONS":
        for trainer in (other for other in __all__ if other.endswith("Trainer")):
            _load(trainer)
    return _load(name)
