"""The output alignment loss inside a Trainer: which crops, and how the loss scales.

arXiv:2506.11769, section 4.2: l_extra is drawn for each optimizer step, the same in all micro-batches and processes;
T + l_extra tokens of each row are read as two crops of T tokens, and their outputs are aligned where both have read at
least T/2 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers.alignment_loss import (
    aligned_cross_entropy,
    largest_extra,
    overlap_positions,
    sample_extra,
    shifted_targets,
    two_crops,
)
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace

logger = logging.get_logger(__name__)


@dataclass
class CropLoss:
    """The part of a micro-batch in L* (Eq. 4) of its step, as Trainer calls a `compute_loss_func`.

    Attributes:
        alpha: Weight of the misalignment.
        extra: l_extra, tokens between the two crops.
        overlap: Pairs of outputs of the micro-batch that are aligned.
        step_overlap: Those of the whole step, of all micro-batches and processes.
        misalignment: Mean of the micro-batch, once the loss is computed.
    """

    alpha: float
    extra: int
    overlap: int
    step_overlap: int
    misalignment: Tensor | None = None

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss of outputs with logits (2B, T, V) on shifted targets (2B, T).

        Args:
            outputs: Of the model.
            labels: Shifted targets.
            num_items_in_batch: Targets of the whole step, or None where Trainer averages over micro-batches.
        """
        divisor = None if num_items_in_batch is None else self.step_overlap
        result = aligned_cross_entropy(
            outputs["logits"],
            labels,
            self.extra,
            alpha=self.alpha,
            num_items=num_items_in_batch,
            overlap_items=divisor,
        )
        self.misalignment = result.misalignment * ((divisor or self.overlap) / self.overlap)
        return result.loss


@dataclass(frozen=True)
class AlignmentSettings:
    """What the alignment loss needs to know of a run.

    Attributes:
        alpha: Weight of the misalignment, Eq. 4.
        length: T, tokens of a crop; None for as many as the rows allow.
        min_extra: Smallest l_extra.
        given_max_extra: Largest l_extra; None for T - T // 2 - 1, the largest that leaves an overlap.
    """

    alpha: float
    length: int | None
    min_extra: int
    given_max_extra: int | None

    @classmethod
    def of(cls, args: InitialStateConfig, model: Any, own_loss: Callable[..., Any] | None) -> "AlignmentSettings":
        """From the arguments of a trainer.

        Raises:
            ValueError: for a model or loss function with another loss than next-token cross-entropy, and for shifts
                that the length does not allow.
        """
        if own_loss is not None:
            raise ValueError("alignment_alpha computes the loss itself: leave compute_loss_func out.")
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ValueError(
                "The alignment loss would leave out the model's router loss: set output_router_logits=False."
            )
        settings = cls(args.alignment_alpha, args.alignment_length, args.alignment_min_extra, args.alignment_max_extra)
        if settings.length is not None:
            settings._check(settings.length, f"With alignment_length {settings.length}")
        return settings

    @property
    def max_extra(self) -> int:
        """Largest l_extra where the length is given."""
        return self._range(self.length)[1] if self.length is not None else 0

    def _range(self, length: int) -> tuple[int, int]:
        return self.min_extra, largest_extra(length) if self.given_max_extra is None else self.given_max_extra

    def _check(self, length: int, given: str) -> None:
        low, high = self._range(length)
        if not low <= high <= largest_extra(length):
            raise ValueError(
                f"{given}, l_extra may lie between 1 and {largest_extra(length)}, so that both "
                f"crops share tokens with at least T/2 of context; got {low} to {high}."
            )

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        """Trainer only needs to know that there is a loss function: each micro-batch has its own, a `CropLoss`."""
        raise ValueError("The alignment loss is of InitialStateTrainer.compute_loss: call super().compute_loss(...).")

    def crop(self, inputs: dict[str, Any], place: BatchPlace) -> tuple[dict[str, Any], CropLoss]:
        """The 2B rows of a micro-batch, first crops, then second crops, with shifted targets; and their loss.

        Raises:
            ValueError: for rows that are too short, have padding, or no labels.
        """
        tokens = inputs["input_ids"].shape[1]
        length = self.length
        if length is None:  # the largest T with T + max_extra <= tokens
            length = next((n for n in range(tokens, 0, -1) if n + self._range(n)[1] <= tokens), 0)
            self._check(length, f"In rows of {tokens} tokens, so crops of {length}")
            logger.warning_once(
                f"alignment_length is not given: rows of {tokens} tokens are read as crops of T = {length}, up to "
                f"{self._range(length)[1]} tokens apart."
            )
        low, high = self._range(length)
        if tokens < length + high:
            raise ValueError(
                f"Rows have {tokens} tokens, but crops of {length} that start up to {high} tokens apart need "
                f"{length + high}: give longer rows, or a smaller alignment_length or alignment_max_extra."
            )
        if tokens > length + high:
            logger.warning_once(
                f"Rows have {tokens} tokens, of which the alignment loss reads {length + high} at most: give shorter "
                "rows, or a larger alignment_length."
            )
        extra = sample_extra(replace(place, micro_batch=0), low, high)
        crops = two_crops(inputs, length, extra)
        targets = shifted_targets(crops)
        # Trainer counts targets in `shift_labels`, and hands `labels` to the loss.
        overlap = overlap_positions(place.rows, length, extra)
        return crops | {"labels": targets, "shift_labels": targets}, CropLoss(self.alpha, extra, overlap, overlap)
