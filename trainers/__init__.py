"""Trainers that choose the initial state of training sequences; imported as hf_recurrent_lengthgen.trainers.

The names are loaded on first use: a trainer loads its own file and what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.alignment import AlignmentConfig, AlignmentTrainer
    from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS, InitialStateTrainer
    from hf_recurrent_lengthgen.trainers.combining import combine
    from hf_recurrent_lengthgen.trainers.fitted_noise import FittedNoise, FittedNoiseConfig, FittedNoiseTrainer
    from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
    from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource
    from hf_recurrent_lengthgen.trainers.learned_state import (
        LearnedStateConfig,
        LearnedStateSource,
        LearnedStateTrainer,
    )
    from hf_recurrent_lengthgen.trainers.metric_callbacks import Metric, MetricCallback
    from hf_recurrent_lengthgen.trainers.mixed_states import MixedStates, MixedStatesConfig, MixedStatesTrainer
    from hf_recurrent_lengthgen.trainers.random_noise import RandomNoise, RandomNoiseConfig, RandomNoiseTrainer
    from hf_recurrent_lengthgen.trainers.ready_metrics import (
        context_harm,
        effective_remembrance_at,
        length_evaluation,
        misalignment,
        nll_by_length,
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
    "nll_by_length",
    "retrieval",
]
_METHODS = {
    "alignment": ("AlignmentConfig", "AlignmentTrainer"),
    "fitted_noise": ("FittedNoise", "FittedNoiseConfig", "FittedNoiseTrainer"),
    "learned_state": ("LearnedStateConfig", "LearnedStateSource", "LearnedStateTrainer"),
    "mixed_states": ("MixedStates", "MixedStatesConfig", "MixedStatesTrainer"),
    "random_noise": ("RandomNoise", "RandomNoiseConfig", "RandomNoiseTrainer"),
    "state_passing": ("PassedStates", "StatePassingConfig", "StatePassingTrainer"),
    "statex": ("StateXConfig", "StateXTrainer"),
    "tbtt": ("TbttConfig", "TbttTrainer"),
    "zero_state": ("ZeroStateTrainer", "ZeroStates"),
}
_OTHERS = {
    "base": ("INTERVENTIONS", "InitialStateTrainer"),
    "combining": ("combine",),
    "initial_state_config": ("InitialStateConfig",),
    "initial_states": ("BatchPlace", "InitialStateSource"),
    "metric_callbacks": ("Metric", "MetricCallback"),
}
_HOMES = {name: file for file, names in {**_METHODS, **_OTHERS}.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562); `INTERVENTIONS` holds all methods, so it imports all of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for file in _METHODS if name == "INTERVENTIONS" else ():
        import_module(f"{__name__}.{file}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'ready_metrics')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
