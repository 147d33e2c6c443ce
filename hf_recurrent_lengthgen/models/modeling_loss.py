"""The loss of a language model in chunks of tokens, so that the logits (B, T, V) are never in memory at once.

A chunk's gradients are computed with its loss, in the forward pass (Hsu et al., 2024, "Liger Kernel",
arXiv:2410.10989, section 3.2): that of its hidden states, and that of the weight, which is summed over chunks. So no
logits stay in memory, and none are computed twice; the backward pass scales both. Tokens without a target get no
logits on a CPU. On a GPU, fla's cross-entropy scores a chunk where fla is installed.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .layers_mixer import is_plain
from .modeling_heads import IGNORED_LABEL, StatefulForCausalLM, scored_labels
from .rows import Rows
from .scan_backends import backward_once
from .scan_fla_kernels import fla_kernel
from .state_value import state_dtype

fla_cross_entropy = fla_kernel("fla.modules.fused_cross_entropy", "cross_entropy_loss")
LOGITS_PER_CHUNK = 2**25
"""Logits in memory at once, 128 MiB in float32: fewer tokens at a time are slower, more take more memory."""

Score = Callable[[Tensor, Tensor], Tensor]
"""The sum of the losses of hidden states (1, N, D) on their targets (1, N)."""


def loss_without_logits(
    model: Any, hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, rows: Rows, num_items: Any
) -> Tensor:
    """The loss of a language model of a family for its last hidden states (B, T, D); arguments as of its `forward`.

    Raises:
        ValueError: without labels, for labels of another shape, and for a model that cannot skip logits.
    """
    check_skips(model, labels, shift_labels)
    head = model.get_output_embeddings()
    if not takes_chunks(head, hidden.shape[:2].numel()):
        loss: Tensor = model._loss_of(model.logits_of(hidden), labels, shift_labels, rows, num_items)
        return loss

    def score(hidden: Tensor, targets: Tensor) -> Tensor:
        if takes_fla(model, hidden):  # without the logits in float32 and their softmax in memory
            logits = head(hidden.to(head.weight.dtype))[0]
            torch._assert_async((targets < head.out_features).all(), "labels must be below the vocabulary")
            return fla_cross_entropy(logits, targets[0], inplace_backward=True)[0].sum()
        (size, length), logits = targets.shape, model.logits_of(hidden)
        summed: Tensor = model._loss_of(logits, None, targets, Rows((size, length)), 1)
        return summed

    return chunked_loss(score, head, hidden, shifted(labels, shift_labels, rows), num_items)


def check_skips(model: Any, labels: Tensor | None, shift_labels: Tensor | None) -> None:
    """Raise a `ValueError` if a call without logits would have no loss, or another than that of its logits."""
    if labels is None and shift_labels is None:
        raise ValueError("skip_logits asks for a loss only: give labels or shift_labels, or leave it out.")
    if not model.can_skip_logits:
        raise ValueError(
            f"The loss of {type(model).__name__} is not a sum over tokens (a loss_function of your own, or a term of "
            "all logits): leave skip_logits out."
        )


def shifted(labels: Tensor | None, shift_labels: Tensor | None, rows: Rows) -> Tensor:
    """The target of each output, (B, T), with -100 where none is scored; `shift_labels` come before `labels`."""
    if shift_labels is not None:
        return scored_labels(shift_labels, rows, shifted=True)
    assert labels is not None
    return pad(scored_labels(labels, rows)[:, 1:], (0, 1), value=IGNORED_LABEL)


def takes_chunks(head: Any, tokens: int) -> bool:
    """Whether the loss of so many tokens is computed in chunks: where logits are many, behind a plain linear layer.

    Heads with adapters, hooks, or weights that are sharded by themselves compute all logits at once. In float16,
    gradients need the scale of the GradScaler, which only the backward pass has.
    """
    if type(head) is not nn.Linear or not is_plain(head):
        return False
    device = head.weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    watched = any(weight._backward_hooks for weight in weights_of(head))  # they expect the gradient of all tokens
    return tokens * head.out_features > LOGITS_PER_CHUNK and dtype != torch.float16 and not watched


def weights_of(head: nn.Linear) -> list[Tensor]:
    """Also those that are no parameters of it: of replicas of DataParallel, and of FSDP1 with flat parameters."""
    return [weight for weight in (head.weight, head.bias) if weight is not None]


def takes_fla(model: Any, hidden: Tensor) -> bool:
    """Whether fla's kernel scores a chunk: on a GPU, for models that make logits and score them as families do."""
    own = {getattr(type(model), name) is getattr(StatefulForCausalLM, name) for name in ("logits_of", "_loss_of")}
    return fla_cross_entropy is not None and own == {True} and hidden.is_cuda and hidden.dtype != torch.float64


def chunked_loss(score: Score, head: nn.Linear, hidden: Tensor, targets: Tensor, num_items: Any = None) -> Tensor:
    """The summed loss of hidden states (B, T, D) on targets (B, T), divided by a number; None for that of targets.

    `score` uses no weights but those of `head`.

    Raises:
        ValueError: for targets of another shape.
    """
    if targets.shape != hidden.shape[:2]:
        raise ValueError(f"Labels must have shape {tuple(hidden.shape[:2])}, got {tuple(targets.shape)}.")
    size = max(1, LOGITS_PER_CHUNK // head.out_features)
    targets = targets.flatten().to(hidden.device)
    inputs = hidden.flatten(0, 1), *weights_of(head)
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    summed: Tensor = _ChunkedLoss.apply(score, size, needs, targets, *inputs)
    count = (targets != IGNORED_LABEL).sum() if num_items is None else torch.as_tensor(num_items).to(hidden.device)
    nothing = count == 0  # NaN, as the mean of cross-entropy, whose gradients are 0
    return summed / count.where(~nothing, 1) + torch.where(nothing, torch.nan, 0.0)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses of N tokens; gradients to their hidden states (N, D) and the weights of the head."""

    @staticmethod
    def forward(
        ctx: Any, score: Score, size: int, needs: bool, targets: Tensor, hidden: Tensor, *weights: Tensor
    ) -> Tensor:
        trained = [x for x in weights if needs and x.requires_grad]
        # sums over chunks have the precision of states, whatever that of the weights
        sums = [torch.zeros_like(x, dtype=state_dtype(x.dtype)) for x in trained]
        of_hidden, losses = torch.zeros_like(hidden), []
        scored = torch.arange(len(targets), device=targets.device)
        if targets.device.type == "cpu":  # elsewhere it would wait for the device
            scored = scored[targets != IGNORED_LABEL]
        for places in scored.split(size):
            with torch.set_grad_enabled(needs):
                chunk = hidden.detach()[places].requires_grad_(needs)
                loss = score(chunk[None], targets[places][None])
            losses.append(loss.detach())
            if needs:
                of_hidden[places], *parts = torch.autograd.grad(loss, (chunk, *trained))
                for whole, part in zip(sums, parts, strict=True):
                    whole += part
        ctx.save_for_backward(of_hidden, *sums)
        ctx.dtypes = hidden.dtype, *(x.dtype for x in trained)
        return torch.stack(losses).sum()

    @staticmethod
    @backward_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [(x * upstream).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        of_weights = iter(found[1:])
        return (*[None] * 4, found[0], *(next(of_weights) if needed else None for needed in ctx.needs_input_grad[5:]))
