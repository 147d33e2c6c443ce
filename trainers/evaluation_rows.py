"""Each row of an evaluation once: accelerate repeats rows in the last batch, to give every process as many."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.trainers.chunked_backprop import IGNORED
from hf_recurrent_lengthgen.trainers.scored_targets import token_labels, token_shape_of


def is_filled_up(accelerator: Any) -> bool:
    """Whether the batch at hand has repeated rows on some process."""
    state = accelerator.gradient_state
    return bool(state.end_of_dataloader and state.remainder > 0)


def present_rows(accelerator: Any, rows: int) -> int:
    """How many of the `rows` of this process are not repeated ones; they come first."""
    if not is_filled_up(accelerator):
        return rows
    left = accelerator.gradient_state.remainder - accelerator.process_index * rows  # counted over all processes
    return min(max(left, 0), rows)


def without_repeated_rows(
    model: nn.Module, inputs: dict[str, Any], present: int, device: torch.device
) -> tuple[dict[str, Any], Tensor | None]:
    """A batch without targets in repeated rows, and how many are left: tokens, or rows for other labels, which stay
    as they are; None without labels.

    Args:
        model: Without wrappers.
        inputs: The batch of this process.
        present: See `present_rows`.
        device: Of the count.
    """
    if all(inputs.get(name) is None for name in ("labels", "shift_labels")):
        return inputs, None
    given = token_labels(model, inputs)
    if not given:
        return inputs, torch.tensor(present, device=device)
    kept = {
        name: torch.cat([inputs[name][:present], torch.full_like(inputs[name][present:], IGNORED)]) for name in given
    }
    targets = kept["shift_labels"] if "shift_labels" in kept else kept["labels"][..., 1:]
    return {**inputs, **kept}, targets.ne(IGNORED).sum().to(device)


def first_rows(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """The first rows of a batch, also of its `initial_state`."""
    rows = token_shape_of(inputs)[0]
    first = {
        name: value[:count] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value
        for name, value in inputs.items()
    }
    if first.get("initial_state") is not None:
        first["initial_state"] = tuple(tuple(part[:count] for part in layer) for layer in first["initial_state"])
    return first


def mean_over_processes(accelerator: Any, loss: Tensor, scored: Tensor) -> Tensor:
    """The mean over the targets of all processes, from the mean over `scored` targets (or rows) of this one."""
    total = torch.where(scored > 0, loss.double() * scored, 0.0)
    summed, count = accelerator.reduce(torch.stack([total, scored.double()]), "sum")
    return (summed / count).to(loss)
