"""What a text does to an earlier state, recorded while a model reads it: the transition A(u) of each layer.

A layer turns the state S before a text u into A(u) S + x(u), where x(u) is its state after u from zero (PICASO, Liu et
al., 2025, arXiv:2502.17605, Proposition 1). A is a decay, (B, ...) to be broadcast over a state, or in delta rules and
Mamba-3 a matrix for each head, (B, H, N, N) to be multiplied from the right.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.evaluation.recorded_scans import recorded_scans
from hf_recurrent_lengthgen.models.scan_affine import AFFINE_MAPS
from hf_recurrent_lengthgen.models.state_value import RecurrentState, learned_row


def is_matrix(transition: Tensor) -> bool:
    """Whether a transition is a matrix for each head; decays of 4 dimensions have one row, (B, H, 1, 1 or N)."""
    return transition.ndim == 4 and transition.shape[2] > 1


def moved_on(x: Tensor, transition: Tensor) -> Tensor:
    """A state, or the transition of an earlier text, after a text that writes nothing."""
    return x @ transition if is_matrix(transition) else x * transition


def check_transitions(transitions: Mapping[int, Tensor], state: RecurrentState, name: str) -> None:
    """Raise a `ValueError` unless there are none, or a finite one that fits for each layer with a recurrent part."""
    for i, layer in enumerate(state if transitions else ()):
        written, sizes = layer.recurrent, layer.recurrent.shape
        x = transitions.get(i, written[..., :0])
        is_decay = x.ndim == len(sizes) and all(n in (1, size) for n, size in zip(x.shape, sizes, strict=True))
        fits = x.shape == (*sizes[:2], sizes[-1], sizes[-1]) if is_matrix(x) else is_decay
        if not (fits and x.dtype == written.dtype and bool(x.isfinite().all())):
            raise ValueError(f"{name}: the transition of layer {i} is missing, not finite, or fits no such state.")


def recorded_transitions(model: Any, recorded: dict[int, Tensor]) -> AbstractContextManager[None]:
    """Within the block, what the model reads extends the transitions `recorded`, by layer."""
    if getattr(model, "attends", False):
        raise ValueError("Texts that a hybrid reads cannot be composed, keys and values not: leave transitions out.")
    if getattr(model.config, "forgetting", None) or learned_row(model) is not None:
        why = "is made to forget, or starts from a learned state, which would count once for each text"
        raise ValueError(f"This {type(model).__name__} {why}: read without these, or without transitions.")

    return recorded_scans(model, {name: partial(_record, recorded, one) for name, one in AFFINE_MAPS.items()})


def _record(recorded: dict[int, Tensor], affine_map: Any, layer: int, *arguments: Tensor) -> None:
    *inputs, state = arguments
    transition = affine_map(*(x.to(state.dtype) for x in inputs)).factor
    recorded[layer] = moved_on(recorded[layer], transition) if layer in recorded else transition
