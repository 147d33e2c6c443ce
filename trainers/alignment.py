"""The output alignment loss inside a Trainer: how rows are cropped, and how the loss is scaled.

Du et al., 2025 (arXiv:2506.11769), section 4.2. l_extra is drawn once for each optimizer step and is the same in all
micro-batches and processes. T + l_extra tokens of each row are read as two crops of T tokens. Their outputs are
aligned at the tokens where both crops have read at least T/2 tokens.

Two options are ours. The Jeffreys divergence in place of the symmetric cross-entropy does not reward certainty. A
second crop that starts from zero, while the first starts from a given state, aligns predictions with and without that
state: two crops from one state cannot, because they never read more than T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers.alignment_loss import (
    Divergence,
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
    """The share of one micro-batch in L* (Eq. 4) of its step: a `compute_loss_func` for Trainer.

    Attributes:
        alpha: Weight of the misalignment.
        divergence: "sce" or "jeffreys", see `aligned_cross_entropy`.
        extra: l_extra, tokens between the starts of the two crops.
        overlap: Aligned pairs of outputs in the micro-batch.
        step_overlap: Aligned pairs of outputs in the whole step, over all micro-batches and processes.
        misalignment: Mean misalignment of the micro-batch; None until the loss is computed.
    """

    alpha: float
    divergence: Divergence
    extra: int
    overlap: int
    step_overlap: int
    misalignment: Tensor | None = None

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss of outputs with logits (2B, T, V) on shifted targets (2B, T).

        Args:
            outputs: Outputs of the model.
            labels: Shifted targets.
            num_items_in_batch: Targets of the whole step, or None where Trainer averages over micro-batches.
        """
        divisor = None if num_items_in_batch is None else self.step_overlap
        result = aligned_cross_entropy(
            outputs["logits"],
            labels,
            self.extra,
            alpha=self.alpha,
            divergence=self.divergence,
            num_items=num_items_in_batch,
            overlap_items=divisor,
        )
        self.misalignment = result.misalignment * ((divisor or self.overlap) / self.overlap)
        return result.loss


@dataclass(frozen=True)
class AlignmentSettings:
    """Settings of the alignment loss for one run.

    Attributes:
        alpha: Weight of the misalignment, Eq. 4.
        length: T, tokens of a crop; None for as many as the rows allow.
        min_extra: Smallest l_extra.
        given_max_extra: Largest l_extra; None for T - T // 2 - 1, the largest that leaves an overlap.
        divergence: "sce" or "jeffreys", see `aligned_cross_entropy`.
        second_from_zero: Whether the second crop starts from zero, whatever the state of the first.
    """

    alpha: float
    length: int | None
    min_extra: int
    given_max_extra: int | None
    divergence: Divergence
    second_from_zero: bool

    @classmethod
    def of(
        cls, args: InitialStateConfig, model: Any, own_loss: Callable[..., Any] | None, gives_states: bool
    ) -> "AlignmentSettings":
        """From the arguments of a trainer; `gives_states` is whether its method gives initial states.

        Raises:
            ValueError: if the model or `own_loss` has a loss other than next-token cross-entropy, if the length does
                not allow the shifts, or if the second crop is to start from zero as both crops do.
        """
        if own_loss is not None:
            raise ValueError(
                "compute_loss_func cannot be combined with alignment_alpha, which computes the loss: leave one out."
            )
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ValueError(
                "The alignment loss would leave out the model's router loss: set output_router_logits=False."
            )
        from_zero = args.alignment_second_state == "zero"
        if from_zero and not gives_states:
            raise ValueError(
                "alignment_second_state='zero' has no effect where both crops start from zero: leave it out, or use a "
                "method that gives states, such as TbttTrainer or StatePassingTrainer."
            )
        extra = args.alignment_min_extra, args.alignment_max_extra
        settings = cls(args.alignment_alpha, args.alignment_length, *extra, args.alignment_divergence, from_zero)
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
                f"{given}, l_extra must lie between 1 and {largest_extra(length)}, so that both crops share tokens "
                f"with at least T/2 tokens of context; got {low} to {high}."
            )

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        """Not called: Trainer only checks that there is a loss function, and each micro-batch has a `CropLoss`."""
        raise ValueError(
            "The alignment loss is computed in InitialStateTrainer.compute_loss: call super().compute_loss(...)."
        )

    def crop(self, inputs: dict[str, Any], place: BatchPlace) -> tuple[dict[str, Any], CropLoss]:
        """The 2B rows of a micro-batch with shifted targets (all first crops, then all second crops), and their loss.

        Raises:
            ValueError: if rows are too short, hold padding or have no labels.
        """
        tokens = inputs["input_ids"].shape[1]
        length = self.length
        if length is None:  # the largest even T with T + max_extra <= tokens, as a block has one token more than T
            lengths = (*range(tokens - tokens % 2, 2, -2), 3)  # of 2, no crops share a token with T/2 before it
            length = next((n for n in lengths if n + self._range(n)[1] <= tokens), 2)  # which is refused below
            self._check(length, f"With rows of {tokens} tokens, read as crops of {length}")
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
                f"Rows have {tokens} tokens, but the alignment loss reads at most {length + high} of them: give "
                "shorter rows or a larger alignment_length."
            )
        extra = sample_extra(replace(place, micro_batch=0), low, high)
        crops = two_crops(inputs, length, extra)
        targets = shifted_targets(crops)
        # Trainer counts targets in `shift_labels`, and hands `labels` to the loss.
        overlap = overlap_positions(place.rows, length, extra)
        return crops | {"labels": targets, "shift_labels": targets}, CropLoss(
            self.alpha, self.divergence, extra, overlap, overlap
        )
