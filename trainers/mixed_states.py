"""Initial states from several sources, drawn independently for each sequence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState, map_state
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource


class MixedStates(InitialStateSource):
    """Each sequence takes its initial state from one of several sources. Every source sees all final states.

    Args:
        sources: Sources by name.
        probabilities: Probability of each source by name; at least 0, with sum 1.
    """

    def __init__(self, sources: Mapping[str, InitialStateSource], probabilities: Mapping[str, float]) -> None:
        check_probabilities(probabilities)
        if set(sources) != set(probabilities):
            raise ValueError(
                "Sources and probabilities must have the same names, got "
                f"{sorted(sources)} and {sorted(probabilities)}."
            )
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
            given = source.initial_state(place)
            if given is None:
                continue
            mixed = map_state(torch.zeros_like, given) if mixed is None else mixed
            mixed = _rows_where(chosen == index, given, mixed)
        return mixed

    @property
    def sources(self) -> dict[str, InitialStateSource]:
        return self._sources

    def observe(self, place: BatchPlace, final_state: RecurrentState, broken: Tensor | None = None) -> None:
        for source in self._sources.values():
            source.observe(place, final_state, broken)

    def end_step(self) -> None:
        for source in self._sources.values():
            source.sum_over_processes = self.sum_over_processes
            source.end_step()

    def reset(self) -> None:
        for source in self._sources.values():
            source.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the sources, as `{source}.{name}`."""
        kept = {name: source.state_dict() for name, source in self._sources.items()}
        return {f"{name}.{key}": value for name, tensors in kept.items() for key, value in tensors.items()}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: for tensors of unknown sources.
        """
        unknown = [key for key in tensors if key.partition(".")[0] not in self._sources]
        if unknown:
            raise ValueError(f"The tensors {unknown[:4]} belong to none of the sources {list(self._sources)}.")
        for name, source in self._sources.items():
            own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
            source.load_state_dict(own, device)

    def logs(self) -> dict[str, float]:
        return {key: value for source in self._sources.values() for key, value in source.logs().items()}


def check_probabilities(probabilities: Mapping[str, float]) -> None:
    """Raise a `ValueError` unless probabilities are at least 0 and add up to 1."""
    numbers = [value for value in probabilities.values() if isinstance(value, int | float) and 0.0 <= value <= 1.0]
    if not numbers or len(numbers) < len(probabilities) or abs(sum(numbers) - 1.0) > 1e-6:
        raise ValueError(f"The shares of a mixture must be at least 0 and add up to 1, got {dict(probabilities)}.")


def _rows_where(rows: Tensor, given: RecurrentState, other: RecurrentState) -> RecurrentState:
    """The rows of `given` where the mask `rows` (B,) is true, else those of `other`."""

    def choose(part: Tensor, rest: Tensor) -> Tensor:
        return torch.where(rows.to(part.device).reshape(-1, *[1] * (part.ndim - 1)), part, rest)

    return tuple(
        LayerState(*(choose(*parts) for parts in zip(*layers, strict=True)))
        for layers in zip(given, other, strict=True)
    )
