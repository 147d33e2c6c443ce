"""Crops and draws by hand; the loss against the formulas in float64, F.cross_entropy and finite differences."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_recurrent_lengthgen.trainers.alignment_loss import (
    aligned_cross_entropy,
    default_extra,
    largest_extra,
    overlap_positions,
    sample_extra,
    shifted_targets,
    two_crops,
)
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace

ALPHA = 0.3


def naive(
    logits: Tensor, targets: Tensor, extra: int, divergence: str = "sce", min_context: int | None = None
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and mean divergence in float64, position by position."""
    probabilities = logits.double().softmax(-1)
    rows, length = len(logits) // 2, logits.shape[1]
    least = length // 2 if min_context is None else min_context
    losses, distances = [], []
    for row in range(2 * rows):
        for t in range(length):
            if targets[row, t] != -100:
                losses.append(-probabilities[row, t, targets[row, t]].log())
    for row in range(rows):
        for token in range(length + extra):  # token stands at `token` in crop 1, at `token - extra` in crop 2
            if least <= token - extra and token < length:
                p, q = probabilities[row, token], probabilities[rows + row, token - extra]
                sce = -(p @ q.log() + q @ p.log())
                distances.append(sce if divergence == "sce" else (p - q) @ (p / q).log())
    return torch.stack(losses).mean(), torch.stack(distances).mean()


def random_batch(
    rows: int, length: int, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * rows, length, vocabulary, generator=generator).mul(2).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (2 * rows, length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return logits, targets


@pytest.mark.parametrize("divergence", ["sce", "jeffreys"])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
@pytest.mark.parametrize(
    ("rows", "length", "extra", "min_context"),
    [
        *((1, 3, 1, None), (2, 8, 1, None), (2, 8, 3, None), (3, 9, 2, None), (1, 9, 4, None)),
        *((2, 8, 3, 0), (1, 8, 7, 0), (2, 9, 6, 2), (1, 9, 1, 7)),  # 0: all T - l_extra tokens (section 4.2)
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(
    rows: int, length: int, extra: int, min_context: int | None, chunk_size: int | None, divergence: Any
) -> None:
    logits, targets = random_batch(rows, length)
    options = {"alpha": ALPHA, "chunk_size": chunk_size, "divergence": divergence, "min_context": min_context}
    result = aligned_cross_entropy(logits, targets, extra, **options)
    cross_entropy, distance = naive(logits, targets, extra, divergence, min_context)
    torch.testing.assert_close(result.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(result.misalignment, distance.detach())
    torch.testing.assert_close(result.loss, cross_entropy + ALPHA * distance)
    ours, expected = (
        torch.autograd.grad(0.7 * loss, logits) for loss in (result.loss, cross_entropy + ALPHA * distance)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("num_items", [None, 50, torch.tensor(50)], ids=["mean", "count", "tensor"])
def test_without_alpha_it_is_the_cross_entropy_of_torch(num_items: Any) -> None:
    logits, targets = random_batch(2, 8, dtype=torch.float32)
    loss = aligned_cross_entropy(logits, targets, 2, alpha=0.0, num_items=num_items).loss
    reduction = "mean" if num_items is None else "sum"
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    expected = expected if num_items is None else expected / 50
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_micro_batches_and_processes_add_up_to_one_batch() -> None:
    """Three chunks, two with another l_extra, averaged over two processes and scaled as Trainer does."""
    chunks = [(*random_batch(rows, 9), extra) for rows, extra in ((2, 1), (1, 3), (3, 3))]
    items = sum(int((targets != -100).sum()) for _, targets, _ in chunks)
    overlap = sum(overlap_positions(len(logits) // 2, 9, extra) for logits, _, extra in chunks)
    processes, losses, parts = 2, [], []
    for logits, targets, extra in chunks:
        result = aligned_cross_entropy(logits, targets, extra, alpha=ALPHA, num_items=items, overlap_items=overlap)
        loss = result.loss
        loss *= processes  # in place, as Trainer's compute_loss
        losses.append(loss / processes)
        parts.append(result)
    scored = [int((targets != -100).sum()) for _, targets, _ in chunks]
    pairs = [2 * 4, 1 * 2, 3 * 2]  # rows x (9 - 4 - l_extra)
    means = [naive(*chunk) for chunk in chunks]
    cross_entropy = sum(m[0] * n for m, n in zip(means, scored, strict=True)) / sum(scored)
    distance = sum(m[1] * n for m, n in zip(means, pairs, strict=True)) / sum(pairs)
    torch.testing.assert_close(sum(losses), cross_entropy + ALPHA * distance)
    torch.testing.assert_close(sum(x.cross_entropy for x in parts), cross_entropy.detach())
    torch.testing.assert_close(sum(x.misalignment for x in parts), distance.detach())
    inputs = [logits for logits, _, _ in chunks]
    ours = torch.autograd.grad(sum(losses), inputs)
    torch.testing.assert_close(ours, torch.autograd.grad(cross_entropy + ALPHA * distance, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_worked_on_in_float32(dtype: torch.dtype) -> None:
    logits, targets = random_batch(2, 8, vocabulary=50, dtype=dtype)
    result = aligned_cross_entropy(logits, targets, 2, alpha=ALPHA)
    cross_entropy, distance = naive(logits, targets, 2)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.double(), cross_entropy + ALPHA * distance, rtol=1e-5, atol=0)
    (ours,) = torch.autograd.grad(result.loss, logits)
    (exact,) = torch.autograd.grad((cross_entropy + ALPHA * distance), logits)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_only_the_loss_has_a_gradient_and_far_logits_stay_finite() -> None:
    logits = torch.full((2, 8, 3), -1e4)
    logits[0, :, 0] = logits[1, :, 1] = 1e4
    result = aligned_cross_entropy(logits.requires_grad_(), torch.zeros(2, 8, dtype=torch.long), 1, alpha=ALPHA)
    assert not result.cross_entropy.requires_grad
    assert not result.misalignment.requires_grad
    assert result.misalignment.item() == pytest.approx(4e4)
    result.loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_micro_batch_without_targets_is_aligned_all_the_same() -> None:
    logits, targets = random_batch(1, 8)
    result = aligned_cross_entropy(logits, targets.fill_(-100), 1, alpha=ALPHA, num_items=7)
    assert result.cross_entropy.item() == 0
    torch.testing.assert_close(result.loss, ALPHA * naive(logits, targets.new_zeros(2, 8), 1)[1])


class Allocations(TorchDispatchMode):
    """Numbers of elements of the tensors that operations make, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view:
            inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                    self.sizes.append(x.numel())
        return result


@pytest.mark.parametrize("divergence", ["sce", "jeffreys"])
def test_one_tensor_of_the_size_of_the_logits_is_made_and_none_kept(divergence: Any) -> None:
    length, vocabulary, chunk = 30, 64, 4
    logits, targets = random_batch(1, length, vocabulary, torch.float32)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
        Allocations() as forward,
    ):
        loss = aligned_cross_entropy(logits, targets, 5, alpha=ALPHA, chunk_size=chunk, divergence=divergence).loss
    assert {x.data_ptr() for x in kept if x.numel() > 2 * length} == {logits.data_ptr()}
    assert max(forward.sizes) == chunk * vocabulary
    with Allocations() as backward:
        torch.autograd.grad(loss, logits, torch.ones(()))
    assert sorted(backward.sizes)[-2:] == [chunk * vocabulary, logits.numel()]


@pytest.mark.parametrize(("length", "largest"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 3), (9, 4), (2048, 1023)])
def test_largest_extra_leaves_one_position(length: int, largest: int) -> None:
    assert largest_extra(length) == largest
    with pytest.raises(ValueError, match=f"between 1 and {largest} for crops of {length} tokens, got {largest + 1}"):
        overlap_positions(1, length, largest + 1)
    with pytest.raises(ValueError, match="got 0"):
        overlap_positions(1, length, 0)
    if largest:
        assert overlap_positions(3, length, largest) == 3
    assert largest_extra(length, 0) == length - 1
    assert default_extra(length) == largest
    assert default_extra(length, 0) == min(length // 2, length - 1)
    if length > 1:
        assert overlap_positions(3, length, length - 1, 0) == 3
        with pytest.raises(ValueError, match="no token has 0 tokens before it in both crops"):
            overlap_positions(1, length, length, 0)


def test_extra_is_uniform_and_keyed_by_seed_step_and_slot() -> None:
    draws = Counter(sample_extra(BatchPlace(0, step, 0, 0, 2), 3, 8) for step in range(6000))
    assert set(draws) == {3, 4, 5, 6, 7, 8}
    assert all(abs(count - 1000) < 5 * math.sqrt(6000 * 5 / 36) for count in draws.values())

    def draw(seed: int, step: int, micro_batch: int, first_row: int = 0, rows: int = 2) -> int:
        return sample_extra(BatchPlace(seed, step, micro_batch, first_row, rows), 1, 10**9)

    assert draw(1, 2, 3) == draw(1, 2, 3, first_row=2, rows=5)
    assert len({draw(1, 2, 3), draw(0, 2, 3), draw(1, 3, 3), draw(1, 2, 0)}) == 4
    assert sample_extra(BatchPlace(0, 0, 0, 0, 1), 4, 4) == 4


def test_crops_by_hand() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
    batch = {"input_ids": ids, "labels": ids + 100, "attention_mask": torch.ones_like(ids), "num_items": 3}
    batch["attention_mask"][:, 5] = 0  # past the crops
    cropped = two_crops(batch, 4, 1)
    rows = [[10, 11, 12, 13], [20, 21, 22, 23], [11, 12, 13, 14], [21, 22, 23, 24]]
    assert cropped["input_ids"].tolist() == rows
    assert cropped["labels"].tolist() == [[x + 100 for x in row] for row in rows]
    assert cropped["attention_mask"].tolist() == [[1] * 4] * 4
    assert cropped["num_items"] == 3
    assert set(cropped) == set(batch)
    assert shifted_targets(cropped).tolist() == [[x + 100 for x in row[1:]] + [-100] for row in rows]


def test_shifted_labels_keep_the_target_of_the_last_token() -> None:
    ids = torch.arange(6)[None]
    cropped = two_crops({"input_ids": ids, "labels": ids, "shift_labels": ids + 1}, 4, 1)
    assert shifted_targets(cropped).tolist() == [[1, 2, 3, 4], [2, 3, 4, 5]]


def test_batches_that_cannot_be_cropped_are_refused() -> None:
    ids = torch.arange(12).view(2, 6)
    padded = torch.tensor([[1] * 6, [0] + [1] * 5])
    for batch, length, extra, message in (
        ({"attention_mask": padded}, 4, 1, "attention_mask has zeros"),
        ({"position_ids": ids}, 4, 1, "leave position_ids out"),
        ({"seq_idx": ids}, 4, 1, "leave seq_idx out"),
        ({"state_resets": ids == 0}, 4, 1, "leave state_resets out"),
        ({"lengths": torch.tensor([6, 6])}, 4, 1, r"lengths of shape \(2,\) cannot be cropped"),
    ):
        with pytest.raises(ValueError, match=message):
            two_crops({"input_ids": ids, **batch}, length, extra)
    with pytest.raises(ValueError, match="neither labels nor shift_labels"):
        shifted_targets({"input_ids": ids, "labels": None})
