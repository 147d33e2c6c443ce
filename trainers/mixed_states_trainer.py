"""Post-training from a mixture of initial states."""

from typing import Any

from hf_recurrent_lengthgen.methods import Method
from hf_recurrent_lengthgen.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.mixed_states import MixedStates
from hf_recurrent_lengthgen.trainers.mixed_states_config import MixedStatesConfig, mixable


class MixedStatesTrainer(InitialStateTrainer):
    """`Trainer` in which each sequence takes its initial state from one of several sources.

    The shares of the sources add up to 1:

        args = MixedStatesConfig("out", mixture={"zero": 0.1, "state_passing": 0.45, "fitted_noise": 0.45})
        trainer = MixedStatesTrainer(model, args, train_dataset=blocks)
    """

    config_class = MixedStatesConfig
    about = Method(
        "mixed",
        "mixed initial states",
        "Each training text starts from a state that is drawn from several sources, each with its share",
        paper=UNEXPLORED_STATES,
    )
    args: MixedStatesConfig

    is_mixable = False

    @property
    def needs_shuffled_data(self) -> bool:  # type: ignore[override]
        return any(mixable()[name].needs_shuffled_data for name in self.args.shares())

    @property
    def needs_continued_data(self) -> bool:  # type: ignore[override]
        return any(mixable()[name].needs_continued_data for name in self.args.shares())

    @staticmethod
    def initial_state_source(args: MixedStatesConfig, trainer: Any) -> MixedStates:
        made = args.source_configs().items()
        sources = {name: mixable()[name].initial_state_source(config, trainer) for name, config in made}
        return MixedStates(sources, args.shares())
