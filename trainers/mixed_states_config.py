"""Settings of mixtures."""

import json
from dataclasses import dataclass, field
from typing import Any

from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS, InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.mixed_states import check_probabilities

SHARE = "share"
_OF_THE_MIXTURE = {"state_drop_probability": "give zero a share", "noise_at_evaluation": "leave it out"}
"""Settings of single methods that a mixture does not take, and what to do instead."""


def mixable() -> dict[str, type[InitialStateTrainer]]:
    """The trainers whose sources a mixture may draw from, by name; plain training is "zero"."""
    found = {name: trainer for name, trainer in INTERVENTIONS.items() if trainer.is_mixable}
    return {"zero" if name == "none" else name: found[name] for name in sorted(found)}


@dataclass
class MixedStatesConfig(InitialStateConfig):
    """`TrainingArguments` and a mixture: for each source of initial states its share and its settings.

    Raises:
        ValueError: for unknown sources and settings, shares that do not add up to 1, and as in the configs of the
            sources.
    """

    mixture: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "JSON object with the share of each source of initial states, or its share and settings: "
            '{"zero": 0.1, "tbtt": 0.4, "random_noise": {"share": 0.5, "noise_sigma": 3.0}}. A source is drawn for '
            "each sequence. Sources are zero and the interventions that draw or pass states. Required for mixed; "
            "default for statex: only zero."
        },
    )

    def check(self) -> None:
        known = list(mixable())
        if isinstance(self.mixture, str):
            try:
                self.mixture = json.loads(self.mixture)
            except ValueError as error:
                raise ValueError(
                    f"mixture must be a JSON object with the share of each source, got {self.mixture!r}."
                ) from error
        if not isinstance(self.mixture, dict):
            raise ValueError(
                f"mixture must give shares to some of {known}, for instance "
                f"{{'zero': 0.1, 'state_passing': 0.45, 'fitted_noise': 0.45}}; got {self.mixture!r}."
            )
        if unknown := sorted(set(self.mixture) - set(known)):
            raise ValueError(f"mixture must give shares to some of {known}, got {unknown}.")
        check_probabilities(self.shares())
        shuffled = [name for name in self.mixture if mixable()[name].needs_shuffled_data is True]
        continued = [name for name in self.mixture if mixable()[name].needs_continued_data is True]
        if shuffled and continued:
            raise ValueError(
                f"A mixture cannot hold both {shuffled[0]}, which needs shuffled rows, and {continued[0]}, which "
                "needs rows that continue one another: leave one of them out."
            )
        self.source_configs()
        super().check()

    def shares(self) -> dict[str, Any]:
        """The share of each source."""
        assert isinstance(self.mixture, dict)
        return {name: given.get(SHARE) if isinstance(given, dict) else given for name, given in self.mixture.items()}

    def source_configs(self) -> dict[str, InitialStateConfig]:
        """For each source the config of its own trainer, with the settings of the source.

        Raises:
            ValueError: for a setting that the source does not have, and as in that config.
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
                    raise ValueError(
                        f"{key} is not a setting of {name} in a mixture{hint}. Allowed settings: {allowed}."
                    )
            if "state_drop_probability" in own:
                settings["state_drop_probability"] = 0.0
            made[name] = config.alone(**settings)
        return made

    @property
    def assume_shuffled(self) -> bool:
        """Whether the settings of some source say that the data are shuffled."""
        return any(getattr(config, "assume_shuffled", False) for config in self.source_configs().values())
