"""Training from a mixture of initial states."""

from hf_recurrent_lengthgen.methods import Method
from hf_recurrent_lengthgen.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import zero_state_of
from hf_recurrent_lengthgen.trainers.initial_states import InitialStateSource, PassedStates, ZeroStates
from hf_recurrent_lengthgen.trainers.mixed_states import MixedStates
from hf_recurrent_lengthgen.trainers.mixed_states_config import MixedStatesConfig
from hf_recurrent_lengthgen.trainers.noise_states import FittedNoise, RandomNoise


class MixedStatesTrainer(InitialStateTrainer):
    """`Trainer` in which each sequence takes its initial state from one of several sources.

    arguments = MixedStatesConfig("out", mixture={"zero": 0.1, "state_passing": 0.45, "fitted_noise": 0.45})
    trainer = MixedStatesTrainer(model, arguments, train_dataset=blocks)
    """

    config_class = MixedStatesConfig
    about = Method(
        "mixed",
        "mixed initial states",
        "Each training text starts from a state drawn from several sources (zero, noise, other texts, the same text)",
        paper=UNEXPLORED_STATES,
    )
    args: MixedStatesConfig

    @property
    def needs_shuffled_data(self) -> bool:  # type: ignore[override]
        """With passed states."""
        return "state_passing" in self._mixture

    @property
    def needs_continued_data(self) -> bool:  # type: ignore[override]
        """With TBTT."""
        return "tbtt" in self._mixture

    @property
    def _mixture(self) -> dict[str, float]:
        assert isinstance(self.args.mixture, dict)
        return self.args.mixture

    def initial_state_source(self) -> MixedStates:
        args = self.args
        sources: dict[str, InitialStateSource] = {}
        for name in self._mixture:
            if name == "zero":
                sources[name] = ZeroStates()
            elif name == "random_noise":
                assert args.noise_sigma is not None
                sources[name] = RandomNoise(args.noise_sigma, zero_state_of(self))
            elif name == "fitted_noise":
                sources[name] = FittedNoise(zero_state_of(self), args.fitted_noise_beta, args.fitted_noise_groups)
            else:
                sources[name] = PassedStates(0.0, args.carry_conv_state)
        return MixedStates(sources, self._mixture)
