"""The loss in chunks, scored by fla's cross-entropy, against that of all logits in float64."""

import copy

import pytest
import torch

from hf_recurrent_lengthgen.models import modeling_loss
from tests.models.families import GLA, build, random_tokens
from tests.models.law import assert_equal_up_to


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_chunks_that_fla_scores_have_the_loss_and_gradients_of_all_logits(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_loss, "takes_fla", lambda model, hidden: True)
    ids = random_tokens(2, 9)
    labels = ids.where(torch.arange(9) > torch.tensor([[2], [6]]), -100)
    small = build(GLA, dtype)
    monkeypatch.setattr(modeling_loss, "LOGITS_PER_CHUNK", 4 * small.config.vocab_size)
    hidden = torch.randn(2, 9, small.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = labels, None, modeling_loss.Rows((2, 9)), None
    found = []
    for model in (small, copy.deepcopy(small).double()):
        leaf = hidden.to(model.dtype).requires_grad_()
        if model is small:
            loss = modeling_loss.loss_without_logits(model, leaf, *targets)
        else:
            loss = model._loss_of(model.logits_of(leaf), *targets)
        gradients = torch.autograd.grad(loss, [leaf, model.lm_head.weight])
        exact = [x.detach().double() for x in (loss, *gradients)]
        found.append(dict(zip(("loss", "of hidden states", "of the head"), exact, strict=True)))
    assert_equal_up_to(tolerance, *found)
