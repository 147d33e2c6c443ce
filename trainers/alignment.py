"""The output alignment loss inside a Trainer: which crops, and how the loss scales.

arXiv:2506.11769, section 4.2: l_extra is drawn for each optimizer
step, the same in all micro-batches and processes; T + l_extra tokens of each row are read as two crops of T tokens,
and their outputs are aligned where both have read at least T/2 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


class AlignedBatch(NamedTuple):
    """The crops of a micro-batch: `inputs`, with shifted targets as labels, `extra` tokens apart, and the number of
    pairs of outputs that are aligned."""

    inputs: dict[str, Any]
    extra: int
    overlap: int


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

    def crop(self, inputs: dict[str, Any], place: BatchPlace) -> AlignedBatch:
        """The 2B rows of a micro-batch: first crops, then second crops.

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
        return AlignedBatch(
            crops | {"labels": targets, "shift_labels": targets}, extra, overlap_positions(place.rows, length, extra)
        )

    def loss(
        self,
        logits: Tensor,
        targets: Tensor,
        num_items: Tensor | int | None,
        batch: AlignedBatch,
        overlap_items: int,
    ) -> tuple[Tensor, Tensor]:
        """The part of a micro-batch in L* (Eq. 4) of its step, and its own mean misalignment.

        Args:
            logits: (2B, T, V).
            targets: Shifted targets (2B, T).
            num_items: Targets of the whole step, or None where Trainer averages over micro-batches.
            batch: The micro-batch.
            overlap_items: Pairs of outputs of the whole step.
        """
        divisor = None if num_items is None else overlap_items
        result = aligned_cross_entropy(
            logits, targets, batch.extra, alpha=self.alpha, num_items=num_items, overlap_items=divisor
        )
        return result.loss, result.misalignment * ((divisor or batch.overlap) / batch.overlap)
