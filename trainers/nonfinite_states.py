"""Broken states: with NaN or infinite values, or exploded."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState, keep_rows

logger = logging.get_logger(__name__)


class CheckedStates(NamedTuple):
    """Final states with zeros in broken rows, a mask of these rows ((B,) bool, None for none), and values to log."""

    state: RecurrentState
    broken: Tensor | None
    logs: dict[str, Tensor]


def checked_states(
    state: RecurrentState,
    max_rms: float | None,
    otherwise: Literal["stop", "reset"],
    told: str,
    hint: Callable[[], str],
) -> CheckedStates:
    """Replace broken rows of final states by zero, or stop the run.

    Args:
        state: Final states of a micro-batch.
        max_rms: Root mean square of a layer's recurrent state above which it counts as exploded; None for no limit.
        otherwise: What to do with broken rows.
        told: Beginning of the message: which states these are.
        hint: Says how to continue a run that stops here.

    Raises:
        ValueError: for broken rows with "stop".
    """
    norms = part_norms(state)
    broken = nonfinite_rows(state, norms, max_rms)
    logs, found = {"reset_states": broken.double().mean()}, bool(broken.any())
    if found:
        told += describe_nonfinite(state, norms, max_rms)
        if otherwise == "stop":
            raise ValueError(f"{told}. {hint()} To go on from zero in these rows, set nonfinite_states='reset'.")
        logger.warning(f"{told}. The states of these rows are reset to zero.")
        state = keep_rows(state, ~broken)
    rms = recurrent_rms(state, norms)
    if found:
        rms = rms[:, ~broken]
    if rms.numel():
        logs |= {"state_rms": rms.mean(), "state_rms_max": rms.max()}
    return CheckedStates(state, broken if found else None, logs)


def part_norms(state: RecurrentState) -> Tensor:
    """Euclidean norms of the parts of a state, (layers, 2, B); not finite where a value is not."""
    return torch.stack(
        [torch.stack([torch.linalg.vector_norm(part.flatten(1), dim=1) for part in layer]) for layer in state]
    )


def recurrent_layers(state: RecurrentState) -> list[int]:
    """Indices of the layers with a recurrent part; attention, feed-forward and convolution-only layers have none."""
    return [index for index, layer in enumerate(state) if layer.recurrent.shape[1:].numel()]


def recurrent_rms(state: RecurrentState, norms: Tensor) -> Tensor:
    """Root mean square per row of the L layers with a recurrent part, (L, B), from the `part_norms` of the state."""
    layers = recurrent_layers(state)
    sizes = [state[index].recurrent.shape[1:].numel() for index in layers]
    return norms[layers, 0] / norms.new_tensor(sizes).sqrt()[:, None]


def nonfinite_rows(state: RecurrentState, norms: Tensor, max_rms: float | None) -> Tensor:
    """Rows with a value that is not finite or a layer above `max_rms`, (B,)."""
    broken = ~norms.isfinite().all(0).all(0)
    if max_rms is not None:
        broken = broken | (recurrent_rms(state, norms) > max_rms).any(0)
    return broken


def describe_nonfinite(state: RecurrentState, norms: Tensor, max_rms: float | None) -> str:
    """The first broken layer, its defect and the rows, in words."""
    rms = dict(zip(recurrent_layers(state), recurrent_rms(state, norms), strict=True))
    for index in range(len(state)):
        for part, name in enumerate(LayerState._fields):
            rows = (~norms[index, part].isfinite()).nonzero().flatten().tolist()
            if rows:
                return f"layer {index}, part '{name}' has NaN or infinite values in rows {rows}"
        if max_rms is not None and index in rms and bool((rms[index] > max_rms).any()):
            rows = (rms[index] > max_rms).nonzero().flatten().tolist()
            return (
                f"layer {index} has exploded in rows {rows}: the root mean square of its recurrent state is "
                f"{float(rms[index].max()):.3g}, above max_state_rms {max_rms:g}"
            )
    raise AssertionError("no broken state to describe")
