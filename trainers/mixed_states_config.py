"""Settings of mixtures."""

import json
from dataclasses import dataclass, field

from hf_recurrent_lengthgen.trainers.fitted_noise_config import FittedNoiseConfig
from hf_recurrent_lengthgen.trainers.initial_state_config import CarriedStateConfig
from hf_recurrent_lengthgen.trainers.mixed_states import check_probabilities
from hf_recurrent_lengthgen.trainers.random_noise_config import RandomNoiseConfig

SOURCES = ("zero", "state_passing", "tbtt", "random_noise", "fitted_noise")

OPTIONS = {
    "noise_sigma": {"random_noise"},
    "fitted_noise_beta": {"fitted_noise"},
    "fitted_noise_groups": {"fitted_noise"},
    "carry_conv_state": {"state_passing", "tbtt"},
    "assume_shuffled": {"state_passing"},
}
"""Options that belong to some of the sources."""


@dataclass
class MixedStatesConfig(CarriedStateConfig, FittedNoiseConfig, RandomNoiseConfig):
    """`TrainingArguments`, the probabilities of a mixture of sources, and the settings of these sources.

    Raises:
        ValueError: for unknown sources, probabilities that do not add up to 1, options of sources without a share,
            and as the configs of the sources.
    """

    mixture: dict[str, float] | str | None = field(
        default=None,
        metadata={
            "help": f"Probability of each source of initial states, drawn for every sequence: {', '.join(SOURCES)}. "
            'Required, for instance {"zero": 0.1, "state_passing": 0.45, "fitted_noise": 0.45}.'
        },
    )
    assume_shuffled: bool = field(
        default=False,
        metadata={"help": "State that the training data arrive shuffled, as for state passing."},
    )

    def check(self) -> None:
        if isinstance(self.mixture, str):
            try:
                self.mixture = json.loads(self.mixture)
            except ValueError as error:
                raise ValueError(
                    f"mixture must be a mapping from sources to probabilities, got {self.mixture!r}."
                ) from error
        if not isinstance(self.mixture, dict):
            raise ValueError(
                f"mixture must give probabilities to some of {list(SOURCES)}, for instance "
                f"{{'zero': 0.1, 'state_passing': 0.45, 'fitted_noise': 0.45}}; got {self.mixture!r}."
            )
        if unknown := sorted(set(self.mixture) - set(SOURCES)):
            raise ValueError(f"mixture must give probabilities to some of {list(SOURCES)}; unknown are {unknown}.")
        check_probabilities(self.mixture)
        if {"state_passing", "tbtt"} <= set(self.mixture):
            raise ValueError(
                "mixture: state_passing needs shuffled rows and tbtt rows that continue; take one of them."
            )
        if self.state_drop_probability:
            raise ValueError("In a mixture, zero states have their own share: give 'zero' a probability.")
        if "random_noise" in self.mixture and self.noise_sigma is None:
            raise ValueError("noise_sigma goes with random_noise in the mixture, and is missing: give its size.")
        for name, sources in OPTIONS.items():
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if changed and not sources & set(self.mixture):
                raise ValueError(
                    f"{name} goes with {' or '.join(sorted(sources))}, which has no share in the mixture."
                )
        if self.noise_at_evaluation:
            raise ValueError("noise_at_evaluation is an ablation of a single kind of noise, not of mixtures.")
        super().check()
