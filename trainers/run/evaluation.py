"""`Trainer` gives all batches of an evaluation one weight, and counts repeated rows; here each target counts once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.pieces import piece_of_rows
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.run.dataloaders import packs_all
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_labels, token_shape_of
from hf_recurrent_lengthgen.trainers.run.shared_rows import refuse_other_rows

Prediction = tuple[Tensor | None, Tensor | None, Tensor | None]


class WeightedLoss:
    """The mean loss of an evaluation over all its targets, from the means of batches and their numbers of targets."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor]] = []

    def add(self, mean: Tensor, count: Tensor) -> None:
        self._batches.append((mean, count))

    def mean(self) -> float | None:
        """None without a batch that has labels."""
        if not self._batches:
            return None
        means, counts = (torch.stack(values).double() for values in zip(*self._batches, strict=True))
        return float(means.mul(counts).where(counts > 0, 0).sum() / counts.sum())


def predict(
    trainer: Any, step: Callable[[dict[str, Any]], Prediction], inputs: dict[str, Any], loss_only: bool
) -> Prediction:
    """Trainer's `prediction_step`; on several processes, with the mean loss over the tokens that are targets on all of
    them. Rows that were repeated to give all processes the same number have no targets."""
    args, shared, accelerator = trainer.args, trainer.shared, trainer.accelerator
    inputs = trainer.scored(inputs)
    if not (names := token_labels(base_of(trainer.model), inputs)):
        return step(inputs)
    present = token_shape_of(inputs)[0]
    if args.world_size > 1:
        unit = present if packs_all(trainer) else 1  # a packed row is repeated as a whole
        present = unit * present_rows(accelerator, present // unit, args.row_process_index)
    inputs, scored = without_repeated_rows(inputs, names, present)
    if shared.group is None or not loss_only:  # predictions are of whole rows
        loss, logits, labels = step(inputs)
        return None if loss is None else _mean(trainer, loss, scored), logits, labels
    refuse_other_rows(bool(shared.differ(inputs)))
    inputs = piece_of_rows(inputs, shared.rank, shared.size)
    scored = inputs["shift_labels"].ne(IGNORED_LABEL).sum()
    inputs["sequence_group"] = shared.group
    names, trainer.label_names = trainer.label_names, ["shift_labels"]
    try:
        loss, _, _ = step(inputs)
    finally:
        trainer.label_names = names
    assert loss is not None  # there are labels
    return _mean(trainer, loss, scored), None, None


def _mean(trainer: Any, loss: Tensor, scored: Tensor) -> Tensor:
    """The mean over the targets of a batch on all processes, from that over `scored` targets of this one."""
    mean, count = loss, scored.to(loss.device)
    if trainer.args.world_size > 1:
        mean, count = mean_over_processes(trainer.accelerator, loss, scored)
    trainer.evaluated.add(mean, count)
    return mean


def present_rows(accelerator: Any, rows: int, index: int) -> int:
    """How many of the `rows` of this process, the `index`-th that reads rows, are not repeated; these come first."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return rows
    left = state.remainder - index * rows  # counted over all processes
    return min(max(left, 0), rows)


def without_repeated_rows(inputs: dict[str, Any], names: list[str], present: int) -> tuple[dict[str, Any], Tensor]:
    """A batch without targets (labels of these names) in rows after the first `present`, and how many are left."""
    kept = {
        name: torch.cat([inputs[name][:present], torch.full_like(inputs[name][present:], IGNORED_LABEL)])
        for name in names
    }
    targets = kept["shift_labels"] if "shift_labels" in kept else kept["labels"][..., 1:]
    return {**inputs, **kept}, targets.ne(IGNORED_LABEL).sum()


def mean_over_processes(accelerator: Any, loss: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the targets of all processes, from the mean over `scored` targets of this one; their number."""
    scored = scored.to(accelerator.device)
    total = torch.where(scored > 0, loss.double() * scored, 0.0)
    summed, count = accelerator.reduce(torch.stack([total, scored.double()]), "sum")
    return (summed / count).to(loss), count
