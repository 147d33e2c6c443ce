"""What a text leaves of an earlier state: the factor A of S_after = A S_before + S_written, for each layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from hf_recurrent_lengthgen.evaluation.recorded_scans import layers_of, recorded_scans
from hf_recurrent_lengthgen.models.forgetting import Forgetting


class Decay(NamedTuple):
    """The factor of a layer: (B, ...) to be broadcast over the recurrent part, or, if `is_matrix`, (B, H, N, N) to be
    multiplied from the right, as in `AffineMap`."""

    factor: Tensor
    is_matrix: bool

    def of(self, recurrent: Tensor) -> Tensor:
        """What is left of the recurrent part of a state."""
        return recurrent @ self.factor if self.is_matrix else recurrent * self.factor


def then(first: Sequence[Decay], second: Sequence[Decay]) -> tuple[Decay, ...]:
    """The decays of two texts one after the other; () stands for no text."""
    if not first or not second:
        return tuple(first or second)
    return tuple(Decay(new.of(old.factor), new.is_matrix) for old, new in zip(first, second, strict=True))


@contextmanager
def recorded_decays(model: Any) -> Iterator[Callable[[], tuple[Decay, ...]]]:
    """Record the decays of the one call of a model in the `with` block; gives a function that returns them.

    Raises:
        ValueError: for models other than the families of this package, and those that are made to forget.
    """
    mixers: list[Any] = [getattr(block, "scan_mixer", None) for block in layers_of(model)]
    if not all(getattr(mixer, "piece", None) for mixer in mixers) or Forgetting.of(model.config) != Forgetting():
        raise ValueError(
            f"The decays of {type(model).__name__} cannot be recorded: its layers do not say what they do to a state "
            "(models of `stateful`), or it is made to forget. Merge readings by their mean instead."
        )
    found: dict[int, Decay] = {}

    def record(layer: int, *arguments: Tensor) -> None:
        *inputs, state = arguments
        piece = mixers[layer].piece(*(x.to(state.dtype) for x in inputs))
        found[layer] = Decay(piece.factor, piece.is_matrix)

    with recorded_scans(model, {mixer.scan.__name__: record for mixer in mixers}):
        yield lambda: tuple(found[layer] for layer in range(len(mixers)))
