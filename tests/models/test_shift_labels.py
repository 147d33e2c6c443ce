"""Labels that are shifted already: pieces of a text are scored on the token after them."""

import pytest
import torch
from torch.nn import functional as F

from tests.models.families import FAMILIES, SHELL_FAMILIES, Family, build, random_tokens, variant_id


@pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
def test_the_loss_is_the_cross_entropy_of_the_given_targets(family: Family) -> None:
    model = build(family)
    tokens, targets = random_tokens(2, 6), random_tokens(2, 6).flip(1)
    targets[0, 2] = -100
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, 4:] = 0, 0  # outputs before the first real token have read nothing
    scored = targets.masked_fill(torch.tensor([[True] * 3 + [False] * 3, [False] * 6]), -100)
    output = model(tokens, attention_mask=mask, labels=tokens, shift_labels=targets)
    expected = F.cross_entropy(output.logits.flatten(0, 1), scored.flatten())
    torch.testing.assert_close(output.loss, expected)


def test_two_pieces_have_the_loss_of_the_whole() -> None:
    model = build(FAMILIES[0])
    tokens = random_tokens(2, 9)
    shifted = F.pad(tokens[:, 1:], (0, 1), value=-100)
    whole = model(tokens, labels=tokens, num_items_in_batch=16).loss
    first = model(tokens[:, :4], shift_labels=shifted[:, :4], num_items_in_batch=16)
    second = model(tokens[:, 4:], shift_labels=shifted[:, 4:], initial_state=first.final_state, num_items_in_batch=16)
    torch.testing.assert_close(first.loss + second.loss, whole)


def test_targets_of_another_shape_are_refused() -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(2, 4)
    with pytest.raises(ValueError, match=r"shift_labels must have shape \(2, 4\), got \(2, 3\)"):
        model(tokens, shift_labels=tokens[:, 1:])
    with pytest.raises(ValueError, match="drop logits_to_keep"):
        model(tokens, shift_labels=tokens, logits_to_keep=1)
