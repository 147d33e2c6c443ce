"""Mixtures: each sequence draws the source of its initial state, independently, each with its share.

h_{-1} of row i  =  that of source k, with probability share_k
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import UNEXPLORED_STATES
from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.models.state_value import RecurrentState, keep_rows, layer_state
from hf_recurrent_lengthgen.trainers import fitted_noise, random_noise, state_passing, tbtt, zero_state  # noqa: F401 (known in INTERVENTIONS when they are imported)
from hf_recurrent_lengthgen.trainers.base import INTERVENTIONS, InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource

SHARE = "share"


class MixedStates(InitialStateSource):
    """Each sequence takes its initial state from one of several sources. Every source sees all final states.

    Args:
        sources: Sources by name.
        probabilities: Probability of each source by name; at least 0, with sum 1.
    """

    def __init__(self, sources: Mapping[str, InitialStateSource], probabilities: Mapping[str, float]) -> None:
        self.probabilities = {name: float(probabilities[name]) for name in sorted(probabilities)}
        self._sources = {name: sources[name] for name in sorted(sources)}

    def settings(self) -> dict[str, Any]:
        """The probabilities, and the settings of all sources as `source.setting`."""
        inner = {f"{name}.{key}": value for name, s in self._sources.items() for key, value in s.settings().items()}
        return super().settings() | inner

    def initial_state(self, place: BatchPlace) -> RecurrentState | None:
        """Rows from the sources' states; None if all sources give the zero state."""
        bounds = torch.tensor(list(self.probabilities.values()), dtype=torch.float64).cumsum(0)
        bounds[-1] = 1.0  # the sum may be rounded
        chosen = torch.bucketize(place.uniform("mixture").double(), bounds, right=True)
        mixed: RecurrentState | None = None
        for index, source in enumerate(self._sources.values()):
            state = source.initial_state(place)
            if state is not None:
                rows = keep_rows(state, chosen == index)
                mixed = rows if mixed is None else _sum(mixed, rows)
        return mixed

    @property
    def sources(self) -> dict[str, InitialStateSource]:
        return self._sources

    def observe(self, place: BatchPlace, final_state: RecurrentState) -> None:
        for source in self._sources.values():
            source.observe(place, final_state)

    def end_step(self) -> None:
        for source in self._sources.values():
            source.sum_over_processes = self.sum_over_processes
            source.end_step()

    def reset(self) -> None:
        for source in self._sources.values():
            source.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the sources, as `{source}.{name}`."""
        return {f"{name}.{key}": value for name, s in self._sources.items() for key, value in s.state_dict().items()}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        for name, source in self._sources.items():
            own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
            source.load_state_dict(own, device)

    def logs(self) -> dict[str, float]:
        return {key: value for source in self._sources.values() for key, value in source.logs().items()}


def _sum(first: RecurrentState, second: RecurrentState) -> RecurrentState:
    return tuple(layer_state(map(torch.add, *layers)) for layers in zip(first, second, strict=True))


def mixable() -> dict[str, type[InitialStateTrainer]]:
    """The trainers whose sources a mixture may draw from, by name; plain training is "zero"."""
    trainers = sorted(INTERVENTIONS.items())
    return {"zero" if name == "none" else name: trainer for name, trainer in trainers if trainer.is_mixable}


@dataclass
class MixedStatesConfig(InitialStateConfig):
    """`TrainingArguments` and a mixture: for each source of initial states its share and its settings.

    Raises:
        ValueError: for unknown sources and settings, shares that do not add up to 1, and as in the configs of the
            sources.
    """

    mixture: dict[str, Any] | str | None = option(
        None,
        "JSON object with the share of each source of initial states, or its share and settings: "
        '{"zero": 0.1, "tbtt": 0.4, "random_noise": {"share": 0.5, "noise_sigma": 3.0}}. A source is drawn for '
        "each sequence. Sources are zero and the interventions that draw or pass states. Required for mixed; "
        "default for statex: only zero.",
    )

    def check(self) -> None:
        known = list(mixable())
        if isinstance(self.mixture, str):
            with suppress(ValueError):
                self.mixture = json.loads(self.mixture)
        if not isinstance(self.mixture, dict):
            raise ValueError(
                f"mixture must be a JSON object with shares of some of {known}, for instance "
                f"{{'zero': 0.1, 'state_passing': 0.45, 'fitted_noise': 0.45}}; got {self.mixture!r}."
            )
        if unknown := sorted(set(self.mixture) - set(known)):
            raise ValueError(f"mixture must give shares to some of {known}, got {unknown}.")
        shares = self.shares()
        numbers = [share for share in shares.values() if isinstance(share, int | float) and 0.0 <= share <= 1.0]
        if not numbers or len(numbers) < len(shares) or abs(sum(numbers) - 1.0) > 1e-6:
            raise ValueError(f"The shares of a mixture must be at least 0 and add up to 1, got {shares}.")
        shuffled = [name for name in self.mixture if mixable()[name].needs_shuffled_data is True]
        continued = [name for name in self.mixture if mixable()[name].needs_continued_data is True]
        if shuffled and continued and self.bptt_chunk_length is None:
            raise ValueError(
                f"A mixture cannot hold both {shuffled[0]}, which needs shuffled data, and {continued[0]}, which "
                "needs sequences that continue one another: leave one of them out, or set bptt_chunk_length, so that "
                "each sequence is an example, read in chunks."
            )
        self.source_configs()
        super().check()

    def shares(self) -> dict[str, Any]:
        assert isinstance(self.mixture, dict)
        return {name: part.get(SHARE) if isinstance(part, dict) else part for name, part in self.mixture.items()}

    def source_configs(self) -> dict[str, InitialStateConfig]:
        """For each source the config of its own trainer, with the settings of the source.

        Raises:
            ValueError: for a setting that the source does not have, and as in that config.
        """
        assert isinstance(self.mixture, dict)
        made = {}
        for name, part in self.mixture.items():
            config = mixable()[name].config_class
            own = config.method_fields() - InitialStateConfig.method_fields()
            settings = {key: value for key, value in part.items() if key != SHARE} if isinstance(part, dict) else {}
            own -= {"state_drop_probability"}  # zero has a share
            if unknown := sorted(set(settings) - own):
                raise ValueError(
                    f"{unknown[0]} is not a setting of {name} in a mixture. Allowed settings: {sorted(own) or 'none'}."
                )
            if "state_drop_probability" in config.method_fields():
                settings["state_drop_probability"] = 0.0
            made[name] = config.alone(**settings)
        return made

    @property
    def assume_shuffled(self) -> bool:
        """Whether the settings of some source say that the data are shuffled."""
        return any(getattr(config, "assume_shuffled", False) for config in self.source_configs().values())


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
