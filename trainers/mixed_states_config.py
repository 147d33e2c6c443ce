"""Settings of mixtures."""

import json
from dataclasses import dataclass, field
from typing import Any

from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS, InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.mixed_states import check_probabilities

SHARE = "share"
_OF_THE_MIXTURE = {"state_drop_probability": "give zero a share", "noise_at_evaluation": "leave it out"}
"""Settings of single methods that a mixture has others for, and what to do instead."""


def mixable() -> dict[str, type[InitialStateTrainer]]:
    """The trainers whose sources a mixture may draw from, by name; plain training is "zero"."""
    found = {name: trainer for name, trainer in INTERVENTIONS.items() if trainer.is_mixable}
    return {"zero" if name == "none" else name: found[name] for name in sorted(found)}


@dataclass
class MixedStatesConfig(InitialStateConfig):
    """`TrainingArguments` and a mixture: the share of each source of initial states, and the settings of the source.

    Raises:
        ValueError: for unknown sources and settings, shares that do not add up to 1, and as the sources' configs.
    """

    mixture: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Share of each source of initial states, drawn for every sequence, alone or beside settings of "
            'the source: {"zero": 0.1, "tbtt": 0.4, "random_noise": {"share": 0.5, "noise_sigma": 3.0}}. Sources are '
            "zero and the interventions that draw or pass states. Required in mixed; default in statex: zero alone."
        },
    )

    def check(self) -> None:
        known = list(mixable())
        if isinstance(self.mixture, str):
            try:
                self.mixture = json.loads(self.mixture)
            except ValueError as error:
                raise ValueError(f"mixture must be a mapping from sources to shares, got {self.mixture!r}.") from error
        if not isinstance(self.mixture, dict):
            raise ValueError(
                f"mixture must give shares to some of {known}, for instance "
                f"{{'zero': 0.1, 'state_passing': 0.45, 'fitted_noise': 0.45}}; got {self.mixture!r}."
            )
        if unknown := sorted(set(self.mixture) - set(known)):
            raise ValueError(f"mixture must give shares to some of {known}; unknown are {unknown}.")
        check_probabilities(self.shares())
        shuffled = [name for name in self.mixture if mixable()[name].needs_shuffled_data is True]
        continued = [name for name in self.mixture if mixable()[name].needs_continued_data is True]
        if shuffled and continued:
            raise ValueError(
                f"mixture: {shuffled[0]} needs shuffled rows and {continued[0]} rows that continue; take one of them."
            )
        self.source_configs()
        super().check()

    def shares(self) -> dict[str, Any]:
        """The share of each source."""
        assert isinstance(self.mixture, dict)
        return {name: given.get(SHARE) if isinstance(given, dict) else given for name, given in self.mixture.items()}

    def source_configs(self) -> dict[str, InitialStateConfig]:
        """The config of each source's own trainer, with the settings of the source.

        Raises:
            ValueError: for a setting that is not the source's, and as that config.
        """
        assert isinstance(self.mixture, dict)
        made = {}
        for name, given in self.mixture.items():
            config = mixable()[name].config_class
            own = config.method_fields() - InitialStateConfig.method_fields()
            settings = {key: value for key, value in given.items() if key != SHARE} if isinstance(given, dict) else {}
            for key in settings:
                if key not in own or key in _OF_THE_MIXTURE:
                    allowed = sorted(own - _OF_THE_MIXTURE.keys()) or "none"
                    hint = f": {_OF_THE_MIXTURE[key]}" if key in own else ""
                    raise ValueError(f"mixture: {key} is no setting of {name} in a mixture{hint}. It has {allowed}.")
            if "state_drop_probability" in own:
                settings["state_drop_probability"] = 0.0
            made[name] = config.alone(**settings)
        return made

    @property
    def assume_shuffled(self) -> bool:
        """Whether the settings of a source say that the data are shuffled."""
        return any(getattr(config, "assume_shuffled", False) for config in self.source_configs().values())
