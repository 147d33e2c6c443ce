"""Cross-entropy plus output alignment, L* = L_train + alpha L_misalign: pure functions, and their loss in a Trainer.

Du et al., 2025 (arXiv:2506.11769), Eq. 4 and section 4.2. A step takes B sequences of T + l_extra tokens and runs the
first T and the last T tokens of each as two crops, 2B rows. Both crops are trained on. Where both have h tokens before
the same token, the symmetric cross-entropy of Eq. 1 pulls together their predictions after it. l_extra is drawn once
for each optimizer step and is the same in all micro-batches and processes.

The paper has two losses here: the listing of appendix D aligns tokens with at least h = T // 2 before them, our
default, and the text of 4.2 all T - l_extra tokens that the crops share, h = 0. (The listing also pairs output 1 with
itself, by mistake.) The overlap is [h + l_extra, T) in crop 1 and [h, T - l_extra) in crop 2. It has T - h - l_extra
positions, so l_extra is at most T - h - 1: with h = T // 2 the paper's T/2 would leave none, and its l_extra up to T
(Table 5) needs h = 0.

Two options are ours. With H the entropy, SCE(p, q) = KL(p, q) + KL(q, p) + H(p) + H(q): its least value is not at
p = q, but where both are certain of one token. The Jeffreys divergence, KL(p, q) + KL(q, p), is 0 for any p = q. And a
second crop that starts from zero, while the first starts from a passed state, aligns predictions with and without that
state: two crops from one state cannot, because they never read more than T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.utils import logging

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.metrics.misalignment import (
    blocks,
    chunk_positions,
    expected_logs,
    log_normalizers,
    sce_gradients,
)
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, keyed_generator

logger = logging.get_logger(__name__)

Divergence = Literal["sce", "jeffreys"]


def context_of(length: int, min_context: int | None) -> int:
    """h, the tokens before an aligned token in both crops, by default T // 2."""
    return length // 2 if min_context is None else min_context


def largest_extra(length: int, min_context: int | None = None) -> int:
    """The largest l_extra that leaves one position of overlap in crops of T = `length` tokens, T - h - 1."""
    return length - context_of(length, min_context) - 1


def default_extra(length: int, min_context: int | None = None) -> int:
    """The largest l_extra that is drawn by default: the paper's T/2, or less where no overlap would be left."""
    return min(length // 2, largest_extra(length, min_context))


def overlap_positions(rows: int, length: int, extra: int, min_context: int | None = None) -> int:
    """Pairs of positions that the misalignment averages over: B (T - h - l_extra), of B sequences before their crops.

    Raises:
        ValueError: if l_extra is below 1 or leaves no overlap.
    """
    largest = largest_extra(length, min_context)
    if not 1 <= extra <= largest:
        raise ValueError(
            f"l_extra must be between 1 and {largest} for crops of {length} tokens, got {extra}: otherwise no token "
            f"has {context_of(length, min_context)} tokens before it in both crops."
        )
    return rows * (largest + 1 - extra)


def sample_extra(place: BatchPlace, low: int, high: int) -> int:
    """l_extra, uniform in {low, ..., high} and keyed by (seed, step, micro-batch): the same on every process."""
    generator = keyed_generator(place.seed, place.step, place.micro_batch, "extra")
    return int(torch.randint(low, high + 1, (), generator=generator))


def two_crops(inputs: dict[str, Any], length: int, extra: int) -> dict[str, Any]:
    """A batch of B sequences of at least T + l_extra tokens as 2B rows: tokens [0, T), then [l_extra, T + l_extra).

    Every tensor of shape (B, S, ...) is cropped like `input_ids` (B, S); other values stay. Labels are cropped, not
    shifted: without `shift_labels` each crop is scored on its own T - 1 next tokens.

    Raises:
        ValueError: for tensors of another shape, an attention_mask with zeros, position_ids,
            seq_idx or state_resets.
    """
    rows, available = inputs["input_ids"].shape
    for name in ("position_ids", "seq_idx", "state_resets"):
        if inputs.get(name) is not None:
            raise ValueError(
                f"The alignment loss takes no {name}, because both crops start at position 0 from the same state: "
                f"leave {name} out of the batch."
            )
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask[:, : length + extra].all()):
        raise ValueError(
            "attention_mask has zeros, but the alignment loss compares crops by position, so padding would count as "
            "context: pack the text into sequences without padding."
        )
    cropped = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape[:2] != (rows, available):
                raise ValueError(
                    f"{name} of shape {tuple(value.shape)} cannot be cropped: the shape of each tensor must begin "
                    f"with that of input_ids, {(rows, available)}."
                )
            value = torch.cat([value[:, :length], value[:, extra : extra + length]])
        cropped[name] = value
    return cropped


def shifted_targets(inputs: dict[str, Any]) -> Tensor:
    """The target of each output, (B, T): `shift_labels`, else `labels` (B, T) shifted left by one.

    Raises:
        ValueError: if the batch has neither.
    """
    for name in ("shift_labels", "labels"):
        if inputs.get(name) is not None:
            return inputs[name] if name == "shift_labels" else F.pad(inputs[name][:, 1:], (0, 1), value=IGNORED_LABEL)
    raise ValueError("The batch has neither labels nor shift_labels: give one of them.")


class AlignedLoss(NamedTuple):
    """`loss` = `cross_entropy` + alpha * `misalignment`, scalars in nats; the last two are without gradient."""

    loss: Tensor
    cross_entropy: Tensor
    misalignment: Tensor


class _AlignedCrossEntropy(torch.autograd.Function):
    """Saves the logits and a few numbers per position; allocates one tensor of the logits' size, the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        extra: int,
        alpha: float,
        num_items: Tensor | int,
        overlap_items: Tensor | int,
        least: int,
        chunk: int,
        divergence: Divergence,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normalizers = log_normalizers(logits, chunk)
        scored = targets != IGNORED_LABEL
        indices = targets.where(scored, 0)
        hit = logits.gather(-1, indices[..., None])[..., 0]
        cross_entropy = (normalizers - hit).where(scored, 0).sum() / num_items
        pairs = _overlap(logits, extra, least), _overlap(normalizers, extra, least)
        expected = expected_logs(*pairs[0], *pairs[1], chunk)
        own = _expected_own_logs(*pairs, chunk) if divergence == "jeffreys" else torch.zeros_like(expected)
        misalignment = (own - expected).sum() / overlap_items
        ctx.save_for_backward(logits, normalizers, indices, scored, expected, own)
        ctx.settings = extra, alpha, num_items, overlap_items, least, chunk, divergence
        ctx.mark_non_differentiable(cross_entropy, misalignment)
        return cross_entropy + alpha * misalignment, cross_entropy, misalignment

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizers, indices, scored, expected, own = ctx.saved_tensors
        extra, alpha, num_items, overlap_items, least, chunk, divergence = ctx.settings
        gradient = torch.empty_like(logits)
        weights = scored * (upstream / num_items)
        for at in blocks(scored.shape, chunk):
            weight = weights[at][..., None]
            part = (logits[at] - normalizers[at][..., None]).exp_().mul_(weight)
            gradient[at] = part.scatter_add_(-1, indices[at][..., None], -weight)
        share = upstream * alpha / overlap_items
        pairs = tuple(zip(*(_overlap(x, extra, least) for x in (logits, normalizers, gradient)), strict=True))
        for at in blocks(expected.shape[1:], chunk):
            log_p, log_q = (x[at] - normalizer[at][..., None] for x, normalizer, _ in pairs)
            if divergence == "jeffreys":  # of E_p[log p] it is p (log p - E_p[log p])
                for (_, _, result), log, mean in zip(pairs, (log_p, log_q), own[:, *at], strict=True):
                    result[at] += log.exp().mul_(log - mean[..., None]).mul_(share)
            for (_, _, result), part in zip(pairs, sce_gradients(log_p, log_q, expected[:, *at]), strict=True):
                result[at] += part.mul_(share)
        return gradient, *(None,) * 8


def _expected_own_logs(logits: tuple[Tensor, Tensor], normalizers: tuple[Tensor, Tensor], chunk: int) -> Tensor:
    """E_p[log p] and E_q[log q], the negative entropies, as (2, ...)."""
    result = torch.empty((2, *normalizers[0].shape), dtype=normalizers[0].dtype, device=logits[0].device)
    for out, x, normalizer in zip(result, logits, normalizers, strict=True):
        for at in blocks(normalizer.shape, chunk):
            log = x[at] - normalizer[at][..., None]
            out[at] = log.exp().mul_(log).sum(-1)
    return result


def _overlap(x: Tensor, extra: int, least: int) -> tuple[Tensor, Tensor]:
    """The overlap of crop 1 and of crop 2 in x (2B, T, ...), as views (B, T - h - l_extra, ...)."""
    rows = len(x) // 2
    return x[:rows, least + extra :], x[rows:, least : x.shape[1] - extra]


def aligned_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    extra: int,
    *,
    alpha: float,
    num_items: Tensor | int | None = None,
    overlap_items: Tensor | int | None = None,
    min_context: int | None = None,
    chunk_size: int | None = None,
    divergence: Divergence = "sce",
) -> AlignedLoss:
    """Cross-entropy of two crops plus alpha times the mean divergence of their overlap (Eq. 4).

    Memory: the forward pass allocates no second tensor of the size of the logits, the backward pass one, the
    gradient. All else is computed in chunks or is one number per position.

    Under gradient accumulation and on several processes both parts are sums divided by the counts of the whole step:
    cross-entropy = sum over targets / num_items, misalignment = sum over overlap / overlap_items. `overlap_items` are
    the `overlap_positions` of all micro-batches and processes over which Trainer counts num_items_in_batch. Where
    Trainer gives no num_items_in_batch, it divides the loss by the number of micro-batches: leave both None.

    Args:
        logits: Finite logits (2B, T, V) for the rows of `two_crops`: crop 1 of each sequence first, then crop 2.
        targets: Shifted targets (2B, T), -100 where nothing is scored (`shifted_targets`).
        extra: l_extra in tokens, 1 to `largest_extra(T, min_context)`.
        alpha: Weight of the misalignment, at least 0.
        num_items: Number of targets to divide by; None for the scored targets of this call.
        overlap_items: Number of overlap positions to divide by; None for those of this call.
        min_context: h, tokens before an aligned token in both crops; None for T // 2 (appendix D), 0 for all that the
            crops share (section 4.2).
        chunk_size: Positions whose probabilities are in memory at once; by default from `LOGITS_PER_CHUNK`.
        divergence: "sce" for the paper's symmetric cross-entropy (Eq. 1), "jeffreys" for the Jeffreys divergence
            sum (p - q) (log p - log q), ours.

    Returns:
        Scalars in float32, float64 for float64 logits. The gradient has the dtype of the logits.

    Raises:
        ValueError: for chunk_size < 1, and as in `overlap_positions`.
    """
    length = logits.shape[1]
    own_overlap = overlap_positions(len(logits) // 2, length, extra, min_context)
    num_items = (targets != IGNORED_LABEL).sum() if num_items is None else num_items
    overlap_items = own_overlap if overlap_items is None else overlap_items
    num_items, overlap_items = (
        x.to(logits.device) if isinstance(x, Tensor) else x for x in (num_items, overlap_items)
    )
    chunk, least = chunk_positions(logits, chunk_size), context_of(length, min_context)
    return AlignedLoss(
        *_AlignedCrossEntropy.apply(
            logits, targets.to(logits.device), extra, alpha, num_items, overlap_items, least, chunk, divergence
        )
    )


@dataclass
class CropLoss:
    """The share of one micro-batch in L* (Eq. 4) of its step: a `compute_loss_func` for Trainer.

    Attributes:
        alpha: Weight of the misalignment.
        divergence: "sce" or "jeffreys", see `aligned_cross_entropy`.
        extra: l_extra, tokens between the starts of the two crops.
        min_context: h, tokens before an aligned token in both crops; None for half of a crop.
        overlap: Aligned pairs of outputs in the micro-batch.
        step_overlap: Aligned pairs of outputs in the whole step, over all micro-batches and processes.
        misalignment: Mean misalignment of the micro-batch; None until the loss is computed.
    """

    alpha: float
    divergence: Divergence
    extra: int
    min_context: int | None
    overlap: int
    step_overlap: int
    misalignment: Tensor | None = None

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss of outputs with logits (2B, T, V) on shifted targets (2B, T).

        `num_items_in_batch` are the targets of the whole step, or None where Trainer averages over micro-batches.
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
            min_context=self.min_context,
        )
        self.misalignment = result.misalignment * ((divisor or self.overlap) / self.overlap)
        return result.loss


class AlignmentSettings:
    """The settings `alignment_*` in the arguments of a trainer, checked.

    Attributes:
        length: T, tokens of a crop; None for as many as the sequences allow.
        second_from_zero: Whether the second crop starts from zero, whatever the state of the first.

    Raises:
        ValueError: if the model has a loss other than next-token cross-entropy, or with `compute_loss_func`, or if
            the length does not allow the shifts.
    """

    def __init__(self, args: InitialStateConfig, model: Any, own_loss: Callable[..., Any] | None) -> None:
        self.args, self.length = args, args.alignment_length
        self.second_from_zero = args.alignment_second_state == "zero"
        if own_loss is not None:
            raise ValueError(
                "compute_loss_func cannot be combined with alignment_alpha, which computes the loss: leave one out."
            )
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ValueError(
                "The alignment loss would leave out the model's router loss: set output_router_logits=False."
            )
        if self.length is not None:
            self._check(self.length, f"With alignment_length {self.length}")

    @staticmethod
    def share_overlap(trainer: Any, losses: list[CropLoss]) -> None:
        """Tell the losses of a step the number of aligned pairs of all of them, over all processes."""
        overlap = sum(loss.overlap for loss in losses)
        if trainer.args.world_size > 1:
            overlap = int(trainer.accelerator.reduce(torch.tensor(overlap, device=trainer.args.device), "sum"))
        for loss in losses:
            loss.step_overlap = overlap

    @property
    def max_extra(self) -> int:
        """Largest l_extra with `alignment_length`; else 0."""
        return self._range(self.length)[1] if self.length is not None else 0

    def _range(self, length: int) -> tuple[int, int]:
        high, least = self.args.alignment_max_extra, self.args.alignment_min_context
        return self.args.alignment_min_extra, default_extra(length, least) if high is None else high

    def _check(self, length: int, condition: str) -> None:
        (low, high), least = self._range(length), self.args.alignment_min_context
        if not low <= high <= largest_extra(length, least):
            raise ValueError(
                f"{condition}, l_extra must lie between 1 and {largest_extra(length, least)}, so that both crops "
                f"share tokens with at least {context_of(length, least)} tokens of context (alignment_min_context); "
                f"got {low} to {high}."
            )

    def crop(self, inputs: dict[str, Any], place: BatchPlace) -> tuple[dict[str, Any], CropLoss]:
        """The 2B rows of a micro-batch with shifted targets (all first crops, then all second crops), and their loss.

        Raises:
            ValueError: if sequences are too short, hold padding or have no labels.
        """
        tokens = inputs["input_ids"].shape[1]
        length = self.length
        if length is None:  # the largest even T with T + max_extra <= tokens, as a block has one token more than T
            lengths = (*range(tokens - tokens % 2, 2, -2), 3)  # of 2, no crops share a token with T // 2 before it
            length = next((n for n in lengths if n + self._range(n)[1] <= tokens), 2)  # which is refused below
            self._check(length, f"With sequences of {tokens} tokens, read as crops of {length}")
            logger.warning_once(
                f"alignment_length is not set: sequences of {tokens} tokens are read as crops of T = {length}, up to "
                f"{self._range(length)[1]} tokens apart."
            )
        low, high = self._range(length)
        if tokens < length + high:
            raise ValueError(
                f"Sequences have {tokens} tokens, but crops of {length} that start up to {high} tokens apart need "
                f"{length + high}: give longer sequences, or a smaller alignment_length or alignment_max_extra."
            )
        if tokens > length + high:
            logger.warning_once(f"Of sequences of {tokens} tokens, the alignment loss reads {length + high} at most.")
        extra = sample_extra(replace(place, micro_batch=0), low, high)
        crops = two_crops(inputs, length, extra)
        targets = shifted_targets(crops)
        # Trainer counts targets in `shift_labels`, and passes `labels` to the loss.
        args, least = self.args, self.args.alignment_min_context
        overlap = overlap_positions(place.rows, length, extra, least)
        loss = CropLoss(args.alignment_alpha, args.alignment_divergence, extra, least, overlap, overlap)
        return crops | {"labels": targets, "shift_labels": targets}, loss
